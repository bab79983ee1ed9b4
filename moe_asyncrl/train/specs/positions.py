"""Rotary positions of grouped-query models: arguments of `GPTModel`, and fields that its YaRN reads off the config."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.features import Llama3Rope, Yarn
from moe_asyncrl.models.spec import ModelSpec

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
"""What Megatron-Core 0.16.1 has fixed (`RotaryEmbedding._apply_scaling`)."""


def position_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Keyword arguments of `GPTModel`. Multi-latent attention has its positions inside and takes none of them.

    Raises:
        UserError: a stretching that Megatron-Core cannot express.
    """
    scaling = spec.rope_scaling
    found: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": spec.rope_theta,
        "rotary_percent": spec.rotary_fraction,
    }
    if spec.mla is not None:
        return found
    if isinstance(scaling, Yarn):
        found["position_embedding_type"] = "yarn"
    elif isinstance(scaling, Llama3Rope):
        if any(getattr(scaling, name) != value for name, value in _LLAMA3.items()):
            raise UserError(f"{spec.family}: Megatron-Core stretches positions only with {_LLAMA3}, not by {scaling}")
        found |= {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return found


def yarn_attributes(spec: ModelSpec) -> dict[str, Any]:
    """Attributes that `GPTModel` and its attention look for on the configuration, which has no fields for them."""
    yarn = spec.rope_scaling
    if spec.mla is not None or not isinstance(yarn, Yarn):
        return {}
    return {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_context,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.mscale,
        "yarn_mscale_all_dim": yarn.mscale_all_dim,
        "yarn_correction_range_round_to_int": yarn.rounds_range,
    }
