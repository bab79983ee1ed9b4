"""MiniMax-M2: grouped queries normalised over all heads together, partly turned heads, sigmoid router."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3
from moe_asyncrl.train.specs.router import expert_fields, sigmoid_fields


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes. Raises UserError as `sigmoid_fields` does.

    `qk_layernorm` stays off: Megatron-Core's norm is one over each head, and with it gradients of parameters of that
    name are summed over tensor-parallel ranks. `layers` puts `NormOverHeads` in its place.
    """
    return {
        **qwen3.config_fields(spec),
        **expert_fields(spec),
        **sigmoid_fields(spec),
        "qk_layernorm": False,
    }
