"""DeepSeek-V3, Kimi-K2: Megatron-Core's multi-latent attention, first layers dense, shared expert, sigmoid router."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.features import Yarn
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3
from moe_asyncrl.train.specs.router import expert_fields, sigmoid_fields

LATENT_NORM_EPS = 1e-6
"""HF's norms of the latent vectors have this one whatever the config says; Megatron-Core has one for all norms."""


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `MLATransformerConfig` that the architecture fixes. Positions are a part of the attention here.

    Raises:
        UserError: norms or a stretching of positions that Megatron-Core cannot express, or as `sigmoid_fields` does.
    """
    mla = spec.mla
    assert mla is not None
    if spec.norm_eps != LATENT_NORM_EPS:
        raise UserError(f"{spec.family}: norm_eps {spec.norm_eps} is not supported: only {LATENT_NORM_EPS} is")
    return {
        **qwen3.config_fields(spec),
        **expert_fields(spec),
        **sigmoid_fields(spec),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "kv_channels": mla.value_dim,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rotary_base": spec.rope_theta,
        **_rope(spec),
    }


def _rope(spec: ModelSpec) -> dict[str, Any]:
    yarn = spec.rope_scaling
    if yarn is None:
        # The factor scales the softmax even without YaRN.
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if not isinstance(yarn, Yarn) or not yarn.rounds_range or (yarn.mscale is None) != (yarn.mscale_all_dim is None):
        raise UserError(f"{spec.family}: Megatron-Core's multi-latent attention cannot stretch positions by {yarn}")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_context,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": 1.0 if yarn.mscale is None else yarn.mscale,
        "mscale_all_dim": 0.0 if yarn.mscale_all_dim is None else yarn.mscale_all_dim,
    }
