"""gpt-oss: biases everywhere, attention sinks, windows in every other layer, a clamped activation of its own."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3
from moe_asyncrl.train.specs.router import expert_fields, softmax_fields


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes. Raises UserError as `softmax_fields` does."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    assert spec.sliding_window is not None
    return {
        **qwen3.config_fields(spec),
        **expert_fields(spec),
        **softmax_fields(spec),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        # Megatron-Core counts the tokens before a token, HF the token itself with them.
        "window_size": (spec.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(windowed) for windowed in spec.windowed_layers],
        "activation_func": quick_gelu,
        "glu_linear_offset": spec.glu.offset,
        "activation_func_clamp_value": spec.glu.clamp,
    }
