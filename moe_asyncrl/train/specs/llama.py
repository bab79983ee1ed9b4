"""Llama, dense: Qwen3 without norms of queries and keys; `positions` has the stretching of 3.1."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes."""
    return qwen3.config_fields(spec)
