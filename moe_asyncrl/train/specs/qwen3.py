"""Qwen3, dense: grouped queries, RMSNorm on queries and keys, gated SiLU feed-forward, rotary positions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from moe_asyncrl.models.spec import ModelSpec


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes."""
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.attention_bias,
    }
