"""MiniMax-M2: norms over all query and key heads together, half of each head turned, sigmoid scores with a bias.

Reference: `MiniMaxM2ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moe_asyncrl.models.families import blocks, common, moe_blocks
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.features import RouterSpec
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec

NAMES = replace(moe_blocks.MIXTRAL_NAMES, router_dtype="float32")


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a MiniMax-M2 config."""
    for name, only in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if fields.config.get(name, only) != only:
            raise fields.fail(f"`{name}` {fields.config[name]!r} is not supported: only {only!r} is")
    for name in ("use_qk_norm", "use_routing_bias"):
        if not fields.boolean(name, default=True):
            raise fields.fail(f"`{name}` is false: MiniMax-M2 without it is not supported")
    if fields.config.get("router_jitter_noise"):
        raise fields.fail("`router_jitter_noise` is not 0: noise in the router is not supported")
    if fields.config.get("shared_intermediate_size"):
        raise fields.fail("`shared_intermediate_size` is not 0: a shared expert is not supported here")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        norm_topk_prob=True,
        qk_norm=True,
        qk_norm_over_heads=True,
        attention_bias=False,
        router=RouterSpec(scores="sigmoid", expert_bias=True),
        **common.experts_everywhere(fields),
        **common.grouped_queries(fields, default_head_dim=128),
        **common.sizes(fields, context=196608),
        **_rope(fields),
    )


def _rope(fields: HfFields) -> dict[str, Any]:
    """Published configs give the turned elements of a head as `rotary_dim`, newer ones the fraction."""
    found = read_rope(fields, theta=5e6, fraction=1.0)
    if fields.config.get("rotary_dim") is not None:
        stated = fields.integer("rotary_dim") / fields.integer("head_dim", default=128)
        if found["rotary_fraction"] not in (1.0, stated):
            raise fields.fail(f"`rotary_dim` says {stated} of a head, `partial_rotary_factor` another part")
        found["rotary_fraction"] = stated
    return found


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    yield from blocks.embedding(spec)
    for layer in range(spec.num_layers):
        at = blocks.decoder_layer(layer)
        yield from blocks.attention(spec, at)
        yield from moe_blocks.moe_mlp(spec, at, NAMES)
    yield from blocks.head(spec)
    yield from moe_blocks.float32_routers(spec, NAMES)


FAMILY = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        "model_type": "minimax_m2",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    },
)
