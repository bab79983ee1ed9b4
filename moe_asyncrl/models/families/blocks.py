"""Parameters that several families share, as entries of a parameter map.

Megatron names: `megatron/core/models/gpt/gpt_layer_specs.py`, local and Transformer Engine layers. With the latter, a
norm that directly precedes a linear layer is a part of it and is named `….layer_norm_weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_asyncrl.models.algebra import Copy, HfTensor, InterleaveGroups, Stack
from moe_asyncrl.models.parameter_map import Entry, Place
from moe_asyncrl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where a layer stands: the prefixes of its names on both sides, and its place in the pipeline."""

    mine: str
    theirs: str
    layer: int | None = None
    place: Place = Place.LAYER


def decoder_layer(layer: int) -> At:
    """Layer `layer` of the decoder."""
    return At(mine=f"decoder.layers.{layer}.", theirs=f"model.layers.{layer}.", layer=layer)


def embedding(spec: ModelSpec) -> Iterator[Entry]:
    """Token embedding, sharded by vocabulary rows."""
    yield Entry(
        name="embedding.word_embeddings.weight",
        op=Copy(embedding_tensor(spec), pads_rows=True),
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
    tensor = embedding_tensor(spec)
    if not spec.tie_embeddings:
        tensor = HfTensor("lm_head.weight", tensor.shape)
    yield Entry(
        name="output_layer.weight",
        op=Copy(tensor, pads_rows=True),
        shard_axis=0,
        place=Place.LAST,
        tied_copy=spec.tie_embeddings,
    )


def attention(spec: ModelSpec, at: At) -> Iterator[Entry]:
    """Grouped queries: norm, fused query-key-value projection, norms of queries and keys, output projection, sinks."""
    hidden = spec.hidden_size
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield Entry(
        name=at.mine + "input_layernorm.weight",
        te_name=at.mine + "self_attention.linear_qkv.layer_norm_weight",
        op=Copy(HfTensor(at.theirs + "input_layernorm.weight", (hidden,))),
        layer=at.layer,
        place=at.place,
    )
    has_bias = spec.attention_bias or spec.linear_biases
    for kind, columns in (("weight", (hidden,)), ("bias", ())) if has_bias else (("weight", (hidden,)),):
        q, k, v = (
            HfTensor(f"{at.theirs}self_attn.{which}_proj.{kind}", (rows, *columns))
            for which, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        yield Entry(
            name=f"{at.mine}self_attention.linear_qkv.{kind}",
            op=InterleaveGroups((q, k, v), spec.num_kv_heads),
            shard_axis=0,
            layer=at.layer,
            place=at.place,
        )
    if spec.qk_norm:
        for which, rows in (("q", queries), ("k", keys)):
            yield Entry(
                name=f"{at.mine}self_attention.{which}_layernorm.weight",
                op=Copy(
                    HfTensor(
                        f"{at.theirs}self_attn.{which}_norm.weight",
                        (rows if spec.qk_norm_over_heads else spec.head_dim,),
                    )
                ),
                shard_axis=0 if spec.qk_norm_over_heads else None,
                layer=at.layer,
                place=at.place,
            )
    yield from output_projection(spec, at, queries)
    if spec.attention_sinks:
        yield Entry(
            name=at.mine + "self_attention.core_attention.softmax_offset",
            op=Copy(HfTensor(at.theirs + "self_attn.sinks", (spec.num_attention_heads,))),
            shard_axis=0,
            layer=at.layer,
            place=at.place,
        )


def output_projection(spec: ModelSpec, at: At, width: int) -> Iterator[Entry]:
    """From `width` elements of all heads' outputs back to the hidden size."""
    theirs = at.theirs + "self_attn.o_proj."
    yield Entry(
        name=at.mine + "self_attention.linear_proj.weight",
        op=Copy(HfTensor(theirs + "weight", (spec.hidden_size, width))),
        shard_axis=1,
        layer=at.layer,
        place=at.place,
    )
    if spec.linear_biases:
        yield Entry(
            name=at.mine + "self_attention.linear_proj.bias",
            op=Copy(HfTensor(theirs + "bias", (spec.hidden_size,))),
            layer=at.layer,
            place=at.place,
        )


def pre_mlp_norm(spec: ModelSpec, at: At, *, dense: bool) -> Iterator[Entry]:
    """The norm before the feed-forward: Transformer Engine has it inside that of a dense layer."""
    yield Entry(
        name=at.mine + "pre_mlp_layernorm.weight",
        te_name=at.mine + "mlp.linear_fc1.layer_norm_weight" if dense else None,
        op=Copy(HfTensor(at.theirs + "post_attention_layernorm.weight", (spec.hidden_size,))),
        layer=at.layer,
        place=at.place,
    )


def dense_mlp(spec: ModelSpec, at: At) -> Iterator[Entry]:
    """Norm and gated feed-forward of a dense layer."""
    yield from pre_mlp_norm(spec, at, dense=True)
    yield from feed_forward(at, "mlp.", "mlp.", spec.hidden_size, spec.intermediate_size)


def feed_forward(at: At, mine: str, theirs: str, hidden: int, width: int) -> Iterator[Entry]:
    """A gated feed-forward of the dense grid, below the given prefixes."""
    gate, up, down = gated(at.theirs + theirs, hidden, width)
    for which, op, axis in (("linear_fc1", Stack((gate, up)), 0), ("linear_fc2", Copy(down), 1)):
        yield Entry(name=f"{at.mine}{mine}{which}.weight", op=op, shard_axis=axis, layer=at.layer, place=at.place)


def gated(
    prefix: str, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[HfTensor, HfTensor, HfTensor]:
    """Gate, up and down matrices below a prefix."""
    gate, up, down = names
    return (
        HfTensor(f"{prefix}{gate}.weight", (width, hidden)),
        HfTensor(f"{prefix}{up}.weight", (width, hidden)),
        HfTensor(f"{prefix}{down}.weight", (hidden, width)),
    )


def embedding_tensor(spec: ModelSpec) -> HfTensor:
    """The token embedding."""
    return HfTensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
