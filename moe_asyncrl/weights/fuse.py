"""Which HF tensors an engine's loader makes one parameter of, so that they must arrive together. Names only.

Read off `load_weights` of each family in `sglang/srt/models/` (0.5.23): `stacked_params_mapping`, the shards of
`FusedMoE.make_expert_params_mapping`, and `cached_a_proj` of `deepseek_common/deepseek_weight_loader.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_asyncrl.data.errors import UserError


@dataclass(frozen=True, slots=True)
class Fused:
    """`parts`, stored below one prefix, become `whole`."""

    whole: str
    parts: tuple[str, ...]


QKV = Fused("qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP = Fused("gate_up_proj", ("gate_proj", "up_proj"))
"""Of a dense layer, a shared expert, and each routed expert (there it is SGLang's w1 and w3)."""
W13 = Fused("w13", ("w1", "w3"))
LATENT = Fused("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa"))

FUSED: Mapping[str, tuple[Fused, ...]] = MappingProxyType(
    {
        "qwen3": (QKV, GATE_UP),
        "llama": (QKV, GATE_UP),
        "qwen3_moe": (QKV, GATE_UP),
        "mixtral": (QKV, W13),
        "glm4_moe": (QKV, GATE_UP),
        "deepseek_v3": (GATE_UP, LATENT),
        "gpt_oss": (QKV,),
        "minimax_m2": (QKV, W13),
    }
)
"""By our name of the family. gpt-oss stores gate and up in one tensor already."""

KINDS = ("weight", "bias", "weight_scale_inv", "weight_scale", "input_scale")
"""Last parts of names: tensors of one module, which travel together."""
STACKED_KINDS = ("_bias", "_scales", "_blocks")
"""The same for stacks of experts, whose names have no last part of their own: `down_proj_bias`."""


def fused_group(family: str, name: str) -> str:
    """The group of one HF tensor: tensors with the same group are fused, or are scales and biases of one weight.

    Raises UserError for a family that the table does not have.
    """
    table = FUSED.get(family)
    if table is None:
        raise UserError(f"weight plan: nothing is known of how engines fuse the tensors of {family}")
    prefix, _, last = name.rpartition(".")
    if last in KINDS:
        prefix, _, module = prefix.rpartition(".")
    else:
        module = last
        for ending in STACKED_KINDS:
            module = module.removesuffix(ending)
    for fused in table:
        if module in fused.parts:
            module = fused.whole
    return f"{prefix}.{module}" if prefix else module
