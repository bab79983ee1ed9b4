"""GLM-4.5 (Air and 355B): grouped queries with biases, half of each head turned, first layers dense, shared expert.

Reference: `Glm4MoeForCausalLM` of transformers; arXiv 2508.06471, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.families import blocks, common, mtp
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a GLM-4.5 config."""
    width = fields.integer("moe_intermediate_size")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=width,
        shared_expert_size=width * fields.integer("n_shared_experts", minimum=0, default=1),
        qk_norm=fields.boolean("use_qk_norm", default=False),
        attention_bias=fields.boolean("attention_bias", default=False),
        mtp_layers=fields.integer("num_nextn_predict_layers", "num_mtp_layers", minimum=0, default=0),
        **common.leading_dense(fields),
        **common.experts(fields, "n_routed_experts", "num_local_experts"),
        **common.sigmoid_router(fields),
        **common.grouped_queries(fields),
        **common.sizes(fields, context=131072, eps=1e-5),
        **read_rope(fields, theta=10000.0, fraction=0.5),
    )


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    return mtp.model(spec, blocks.attention)


FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        "model_type": "glm4_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
    },
)
