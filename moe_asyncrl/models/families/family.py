"""What a family file provides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_asyncrl.models.hf_fields import HfFields
    from moe_asyncrl.models.parameter_map import Entry
    from moe_asyncrl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: how its config is read, what its parameters are, how its config is written."""

    name: str
    architecture: str
    read_spec: Callable[[HfFields], ModelSpec]
    entries: Callable[[ModelSpec], Iterable[Entry]]
    """Parameters in export order: embedding, layers, final norm, output layer."""
    tiny_config: Mapping[str, Any]
    """An HF config of a few hundred thousand parameters, for tests and demonstrations."""
    windows: bool = False
    """The family has layers with sliding windows."""
