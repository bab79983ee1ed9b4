"""DeepSeek-V3, R1 and Kimi-K2: multi-latent attention, first layers dense, shared expert, sigmoid scores with a bias.

Reference: `DeepseekV3ForCausalLM` of transformers; arXiv 2412.19437, section 2; Kimi K2: arXiv 2507.20534, table 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.families import common, mtp
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.families.latent_attention import latent_attention
from moe_asyncrl.models.features import MlaSpec
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a DeepSeek-V3 or Kimi-K2 config."""
    if fields.boolean("attention_bias", default=False):
        raise fields.fail("`attention_bias` is true: biases in multi-latent attention are not supported")
    if not fields.boolean("rope_interleave", default=True):
        raise fields.fail("`rope_interleave` is false: only pairs of neighbours are turned here")
    width, heads = fields.integer("moe_intermediate_size"), fields.integer("num_attention_heads")
    mla = read_mla(fields)
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=mla.nope_dim + mla.rope_dim,
        mla=mla,
        qk_norm=False,
        attention_bias=False,
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=width,
        shared_expert_size=width * (fields.integer("n_shared_experts", minimum=0, default=0)),
        mtp_layers=fields.integer("num_nextn_predict_layers", "num_mtp_layers", minimum=0, default=0),
        **common.leading_dense(fields),
        **common.experts(fields, "n_routed_experts", "num_local_experts"),
        **common.sigmoid_router(fields),
        **common.sizes(fields, context=4096),
        **read_rope(fields, theta=10000.0, kinds=("yarn",)),
    )


def read_mla(fields: HfFields) -> MlaSpec:
    """The sizes of multi-latent attention. Raises UserError for an odd rotary part."""
    rope = fields.integer("qk_rope_head_dim")
    if rope % 2:
        raise fields.fail(f"`qk_rope_head_dim` {rope} is odd: the rotary embedding turns pairs")
    return MlaSpec(
        q_rank=None if fields.config.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=rope,
        value_dim=fields.integer("v_head_dim"),
    )


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    return mtp.model(spec, latent_attention)


FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
    },
)
