"""GLM-4.5: grouped queries with biases and partly turned heads, first layers dense, shared expert, sigmoid router."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3
from moe_asyncrl.train.specs.router import expert_fields, sigmoid_fields


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes. Raises UserError as `sigmoid_fields` does."""
    return {**qwen3.config_fields(spec), **expert_fields(spec), **sigmoid_fields(spec)}
