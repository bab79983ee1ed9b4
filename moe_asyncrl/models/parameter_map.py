"""The parameters of a model: under which names Megatron keeps them, and which HF tensors they are made of.

One map serves the load of a checkpoint, the export, the weight updates and the plans on meta tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor, Op, numel_of, tensors_of
from moe_asyncrl.models.spec import ModelSpec


class Place(Enum):
    """Which pipeline stage holds a parameter."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


class NameSet(Enum):
    """Whose parameter names: those of Megatron-Core's local layers, or of its Transformer Engine layers."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One Megatron parameter, named with the global layer number and the global expert number."""

    name: str
    """Name under Megatron-Core's local layers; our canonical name."""
    op: Op
    shard_axis: int | None = None
    """Axis along which tensor parallelism (expert tensor parallelism on the expert grid) shards; None: replicated."""
    place: Place = Place.LAYER
    layer: int | None = None
    """Global layer number where `place` is LAYER."""
    expert: int | None = None
    """Global expert number; set exactly for parameters that live on the expert grid."""
    te_name: str | None = None
    """Name under Transformer Engine layers where it differs."""
    tied_copy: bool = False
    """A second copy of the embedding, on a last stage that has no embedding of its own. Loaded, never exported."""
    buffer: bool = False
    """A buffer of the module, which no optimizer changes, in place of a parameter."""

    def named(self, names: NameSet) -> str:
        """The name in one name set."""
        return self.te_name if names is NameSet.TRANSFORMER_ENGINE and self.te_name else self.name

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        """The HF tensors it is made of or takes a part of, in the order of export."""
        return tensors_of(self.op)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return numel_of(self.op)


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """All entries of a model in export order: embedding, layers ascending, final norm, output layer."""

    entries: tuple[Entry, ...]
    _by_name: dict[str, Entry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, Entry] = {}
        for entry in self.entries:
            for name in {entry.name, entry.te_name or entry.name}:
                if name in by_name:
                    raise AssertionError(f"two parameters are named {name}")
                by_name[name] = entry
        object.__setattr__(self, "_by_name", by_name)

    def find(self, name: str) -> Entry:
        """The entry of a global Megatron name of either name set. Raises UserError if there is none."""
        entry = self._by_name.get(name)
        if entry is None:
            raise UserError(f"Megatron parameter {name} is not in the parameter map of this model family")
        return entry

    def hf_tensors(self) -> tuple[HfTensor, ...]:
        """Every HF tensor once, in export order."""
        return tuple(dict.fromkeys(t for entry in self.entries if not entry.tied_copy for t in entry.hf))


@lru_cache(maxsize=8)
def parameter_map(spec: ModelSpec) -> ParameterMap:
    """The map of a model."""
    from moe_asyncrl.models.families import FAMILIES

    return ParameterMap(tuple(FAMILIES[spec.architecture].entries(spec)))
