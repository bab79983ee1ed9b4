"""Parameters of multi-latent attention.

HF: `DeepseekV3Attention`. Megatron: `megatron/core/transformer/multi_latent_attention.py`. Both keep the rotary part of
a head in interleaved order, so nothing is reordered. Transformer Engine has the norms of the latent vectors inside the
up projections, and the layer's first norm by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_asyncrl.models.algebra import Copy, HfTensor
from moe_asyncrl.models.families.blocks import At, output_projection
from moe_asyncrl.models.parameter_map import Entry
from moe_asyncrl.models.spec import ModelSpec


def latent_attention(spec: ModelSpec, at: At) -> Iterator[Entry]:
    """Norm, down and up projections of queries and of keys and values with their norms, output projection."""
    mla = spec.mla
    assert mla is not None

    def entry(name: str, hf_name: str, shape: tuple[int, ...], axis: int | None = None, te: str | None = None) -> Entry:
        mine = at.mine + "self_attention."
        return Entry(
            name=mine + name,
            te_name=None if te is None else mine + te,
            op=Copy(HfTensor(f"{at.theirs}self_attn.{hf_name}", shape)),
            shard_axis=axis,
            layer=at.layer,
            place=at.place,
        )

    heads, hidden = spec.num_attention_heads, spec.hidden_size
    yield Entry(
        name=at.mine + "input_layernorm.weight",
        op=Copy(HfTensor(at.theirs + "input_layernorm.weight", (hidden,))),
        layer=at.layer,
        place=at.place,
    )
    queries = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank is None:
        yield entry("linear_q_proj.weight", "q_proj.weight", (queries, hidden), 0)
    else:
        te = "linear_q_up_proj.layer_norm_weight"
        yield entry("linear_q_down_proj.weight", "q_a_proj.weight", (mla.q_rank, hidden))
        yield entry("q_layernorm.weight", "q_a_layernorm.weight", (mla.q_rank,), te=te)
        yield entry("linear_q_up_proj.weight", "q_b_proj.weight", (queries, mla.q_rank), 0)
    te = "linear_kv_up_proj.layer_norm_weight"
    yield entry("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", (mla.kv_rank + mla.rope_dim, hidden))
    yield entry("kv_layernorm.weight", "kv_a_layernorm.weight", (mla.kv_rank,), te=te)
    keys_and_values = heads * (mla.nope_dim + mla.value_dim)
    yield entry("linear_kv_up_proj.weight", "kv_b_proj.weight", (keys_and_values, mla.kv_rank), 0)
    yield from output_projection(spec, at, heads * mla.value_dim)
