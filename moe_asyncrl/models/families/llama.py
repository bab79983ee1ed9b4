"""Llama, dense: grouped-query attention, gated feed-forward, rotary positions stretched from 3.1 on.

Reference: `LlamaForCausalLM` of transformers; the Llama 3 report (arXiv 2407.21783), section 3.2.
"""

from __future__ import annotations

from moe_asyncrl.models.families import common
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.families.qwen3 import entries
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a Llama config."""
    for name in ("attention_bias", "mlp_bias"):
        if fields.boolean(name, default=False):
            raise fields.fail(f"`{name}` is true: Llama with biases is not supported")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        intermediate_size=fields.integer("intermediate_size"),
        qk_norm=False,
        attention_bias=False,
        **common.dense(fields.integer("num_hidden_layers")),
        **common.grouped_queries(fields),
        **common.sizes(fields, context=2048),
        **read_rope(fields, theta=10000.0, kinds=("llama3",)),
    )


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    },
)
