"""Parameters that several families share, as entries of a parameter map.

Megatron names: `megatron/core/models/gpt/gpt_layer_specs.py`, local and Transformer Engine layers. With the latter, a
norm that directly precedes a linear layer is a part of it and is named `….layer_norm_weight`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.algebra import Copy, HfTensor, InterleaveGroups, Stack
from moe_asyncrl.models.parameter_map import Entry, Place
from moe_asyncrl.models.spec import ModelSpec


def embedding(spec: ModelSpec) -> Iterator[Entry]:
    """Token embedding, sharded by vocabulary rows."""
    yield Entry(
        name="embedding.word_embeddings.weight",
        op=Copy(_embedding_tensor(spec), pads_rows=True),
        shard_axis=0,
        place=Place.FIRST,
    )


def head(spec: ModelSpec) -> Iterator[Entry]:
    """Final norm and output layer."""
    yield Entry(
        name="decoder.final_layernorm.weight",
        op=Copy(HfTensor("model.norm.weight", (spec.hidden_size,))),
        place=Place.LAST,
    )
    tensor = _embedding_tensor(spec)
    if not spec.tie_embeddings:
        tensor = HfTensor("lm_head.weight", tensor.shape)
    yield Entry(
        name="output_layer.weight",
        op=Copy(tensor, pads_rows=True),
        shard_axis=0,
        place=Place.LAST,
        tied_copy=spec.tie_embeddings,
    )


def attention(spec: ModelSpec, layer: int) -> Iterator[Entry]:
    """Norm, fused query-key-value projection, optional per-head norms, output projection."""
    mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden = spec.hidden_size
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield Entry(
        name=mine + "input_layernorm.weight",
        te_name=mine + "self_attention.linear_qkv.layer_norm_weight",
        op=Copy(HfTensor(theirs + "input_layernorm.weight", (hidden,))),
        layer=layer,
    )
    for kind, columns in (("weight", (hidden,)), ("bias", ())) if spec.attention_bias else (("weight", (hidden,)),):
        q, k, v = (
            HfTensor(f"{theirs}self_attn.{which}_proj.{kind}", (rows, *columns))
            for which, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        yield Entry(
            name=f"{mine}self_attention.linear_qkv.{kind}",
            op=InterleaveGroups((q, k, v), spec.num_kv_heads),
            shard_axis=0,
            layer=layer,
        )
    if spec.qk_norm:
        for which in ("q", "k"):
            yield Entry(
                name=f"{mine}self_attention.{which}_layernorm.weight",
                op=Copy(HfTensor(f"{theirs}self_attn.{which}_norm.weight", (spec.head_dim,))),
                layer=layer,
            )
    yield Entry(
        name=mine + "self_attention.linear_proj.weight",
        op=Copy(HfTensor(theirs + "self_attn.o_proj.weight", (hidden, queries))),
        shard_axis=1,
        layer=layer,
    )


def dense_mlp(spec: ModelSpec, layer: int) -> Iterator[Entry]:
    """Norm and gated feed-forward of a dense layer."""
    mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield Entry(
        name=mine + "pre_mlp_layernorm.weight",
        te_name=mine + "mlp.linear_fc1.layer_norm_weight",
        op=Copy(HfTensor(theirs + "post_attention_layernorm.weight", (spec.hidden_size,))),
        layer=layer,
    )
    gate, up, down = _gated(theirs + "mlp.", spec.hidden_size, spec.intermediate_size)
    yield Entry(name=mine + "mlp.linear_fc1.weight", op=Stack((gate, up)), shard_axis=0, layer=layer)
    yield Entry(name=mine + "mlp.linear_fc2.weight", op=Copy(down), shard_axis=1, layer=layer)


def moe_mlp(spec: ModelSpec, layer: int) -> Iterator[Entry]:
    """Norm, router and experts of a mixture-of-experts layer."""
    mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield Entry(
        name=mine + "pre_mlp_layernorm.weight",
        op=Copy(HfTensor(theirs + "post_attention_layernorm.weight", (spec.hidden_size,))),
        layer=layer,
    )
    yield Entry(
        name=mine + "mlp.router.weight",
        op=Copy(HfTensor(theirs + "mlp.gate.weight", (spec.num_experts, spec.hidden_size))),
        layer=layer,
    )
    for expert in range(spec.num_experts):
        gate, up, down = _gated(f"{theirs}mlp.experts.{expert}.", spec.hidden_size, spec.moe_intermediate_size)
        for which, op, axis in (("linear_fc1", Stack((gate, up)), 0), ("linear_fc2", Copy(down), 1)):
            yield Entry(
                name=f"{mine}mlp.experts.local_experts.{expert}.{which}.weight",
                te_name=f"{mine}mlp.experts.{which}.weight{expert}",
                op=op,
                shard_axis=axis,
                layer=layer,
                expert=expert,
            )


def _embedding_tensor(spec: ModelSpec) -> HfTensor:
    return HfTensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))


def _gated(prefix: str, hidden: int, width: int) -> tuple[HfTensor, HfTensor, HfTensor]:
    return (
        HfTensor(prefix + "gate_proj.weight", (width, hidden)),
        HfTensor(prefix + "up_proj.weight", (width, hidden)),
        HfTensor(prefix + "down_proj.weight", (hidden, width)),
    )
