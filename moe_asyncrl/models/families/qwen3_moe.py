"""Qwen3-MoE: the attention of Qwen3, softmax-routed experts without a shared one, dense layers where the config says.

Reference: `Qwen3MoeForCausalLM` of transformers; Qwen3 technical report, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.families import blocks, common, moe_blocks
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.families.qwen3 import FAMILY as QWEN3
from moe_asyncrl.models.families.qwen3 import attention_fields
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a Qwen3-MoE config."""
    layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    outside = [layer for layer in dense if not 0 <= layer < layers]
    if outside:
        raise fields.fail(f"`mlp_only_layers` names layer {outside[0]} of a model of {layers} layers")
    moe_layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(moe_layers):
        raise fields.fail("`mlp_only_layers` and `decoder_sparse_step` leave no mixture-of-experts layer")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        num_layers=layers,
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        moe_layers=moe_layers,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
        **common.experts(fields, "num_experts", "num_local_experts"),
        **attention_fields(fields, default_head_dim=None),
    )


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    yield from blocks.embedding(spec)
    for layer, moe in enumerate(spec.moe_layers):
        at = blocks.decoder_layer(layer)
        yield from blocks.attention(spec, at)
        yield from moe_blocks.moe_mlp(spec, at) if moe else blocks.dense_mlp(spec, at)
    yield from blocks.head(spec)


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        **QWEN3.tiny_config,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    },
)
