"""Mixtral: grouped-query attention, every layer a mixture of experts whose weights are a softmax over the chosen.

Reference: `MixtralForCausalLM` of transformers; arXiv 2401.04088, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.families import blocks, common, moe_blocks
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a Mixtral config."""
    if fields.config.get("sliding_window") is not None:
        raise fields.fail(f"`sliding_window` {fields.config['sliding_window']} is not supported: only null is")
    if fields.config.get("router_jitter_noise"):
        raise fields.fail("`router_jitter_noise` is not 0: noise in the router is not supported")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        norm_topk_prob=True,
        qk_norm=False,
        attention_bias=False,
        **common.experts_everywhere(fields),
        **common.grouped_queries(fields),
        **common.sizes(fields, context=131072, eps=1e-5),
        **read_rope(fields, theta=1e6),
    )


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    yield from blocks.embedding(spec)
    for layer in range(spec.num_layers):
        at = blocks.decoder_layer(layer)
        yield from blocks.attention(spec, at)
        yield from moe_blocks.moe_mlp(spec, at, moe_blocks.MIXTRAL_NAMES)
    yield from blocks.head(spec)


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    },
)
