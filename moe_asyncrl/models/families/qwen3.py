"""Qwen3 dense: grouped-query attention with per-head norms, gated feed-forward.

Reference: `Qwen3ForCausalLM` of transformers; Qwen3 technical report, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_asyncrl.models.families import blocks
from moe_asyncrl.models.families.family import Family
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def read_spec(fields: HfFields) -> ModelSpec:
    """The spec of a Qwen3 config."""
    layers = fields.integer("num_hidden_layers")
    return ModelSpec(
        family=FAMILY.name,
        architecture=FAMILY.architecture,
        num_layers=layers,
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=0,
        num_experts=0,
        experts_per_token=0,
        moe_layers=(False,) * layers,
        norm_topk_prob=False,
        **attention_fields(fields, default_head_dim=128),
    )


def attention_fields(fields: HfFields, *, default_head_dim: int | None) -> dict[str, Any]:
    """The fields that both Qwen3 families read alike. Raises UserError for values that do not fit together."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.fail(f"`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}")
    if default_head_dim is None and fields.config.get("head_dim") is None and hidden % heads:
        raise fields.fail(f"`head_dim` is missing and `hidden_size` {hidden} is not a multiple of {heads} heads")
    head_dim = fields.integer("head_dim", default=default_head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.fail(f"`head_dim` {head_dim} is odd: the rotary embedding turns pairs")
    if fields.boolean("attention_bias", default=False):
        raise fields.fail("`attention_bias` is true: Qwen3 with biases in its attention is not supported")
    vocab = fields.integer("vocab_size")
    pad = fields.token_ids("pad_token_id", vocab)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": fields.integer("max_position_embeddings", default=32768),
        "norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "rope_theta": fields.rope_theta(default=10000.0),
        "tie_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "qk_norm": True,
        "attention_bias": False,
        "eos_token_ids": fields.token_ids("eos_token_id", vocab),
        "pad_token_id": pad[0] if pad else None,
        "torch_dtype": fields.torch_dtype(),
    }


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """Parameters in export order."""
    yield from blocks.embedding(spec)
    for layer in range(spec.num_layers):
        yield from blocks.attention(spec, layer)
        yield from blocks.dense_mlp(spec, layer)
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
