"""Qwen3-MoE: Qwen3 with routed experts in some or all layers; no shared expert, no expert bias."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3
from moe_asyncrl.train.specs.router import expert_fields, softmax_fields


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes. Raises UserError as `softmax_fields` does."""
    return {**qwen3.config_fields(spec), **expert_fields(spec), **softmax_fields(spec)}
