"""Qwen3 dense: grouped-query attention with per-head norms, gated feed-forward.

Reference: `Qwen3ForCausalLM` of transformers; Qwen3 technical report, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_asyncrl.models.families import blocks, common
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.hf_rope import read_rope
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a Qwen3 config."""
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        intermediate_size=fields.integer("intermediate_size"),
        **common.dense(fields.integer("num_hidden_layers")),
        **attention_fields(fields, default_head_dim=128),
    )


def attention_fields(fields: HfFields, *, default_head_dim: int | None) -> dict[str, Any]:
    """The fields that both Qwen3 families read alike. Raises UserError for values that do not fit together."""
    found = {
        **common.grouped_queries(fields, default_head_dim=default_head_dim),
        **common.sizes(fields),
        **read_rope(fields, theta=10000.0),
        "qk_norm": True,
        "attention_bias": False,
    }
    if fields.boolean("attention_bias", default=False):
        raise fields.fail("`attention_bias` is true: Qwen3 with biases in its attention is not supported")
    return found


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    yield from blocks.embedding(spec)
    for layer in range(spec.num_layers):
        at = blocks.decoder_layer(layer)
        yield from blocks.attention(spec, at)
        yield from blocks.dense_mlp(spec, at)
    yield from blocks.head(spec)


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read_spec=read_spec,
    entries=entries,
    tiny_config={
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    },
)
