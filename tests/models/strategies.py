"""Random small models and layouts that fit them."""

from __future__ import annotations

from hypothesis import strategies as st

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec


@st.composite
def specs_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A model of either family and a layout of at most 32 ranks, uneven wherever Megatron-Core allows it."""

    def pick(*values: int) -> int:
        return draw(st.sampled_from(values))

    moe = draw(st.booleans())
    tp, pp, cp = pick(1, 2, 4), pick(1, 2, 4), pick(1, 2)
    vpp = pick(1, 2) if pp > 1 else None
    ep, etp = (pick(1, 2, 4), pick(1, 2)) if moe else (1, tp)
    if ep == 1:
        etp = tp
    dp = pick(1, 2)
    while (tp * cp * dp) % (ep * etp):
        dp *= 2
    layers = pp * (vpp or 1) * pick(1, 2)
    flags = tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))) if moe else (False,) * layers
    if moe and not any(flags):
        flags = (*flags[:-1], True)
    kv_heads = max(1, tp // pick(1, 2)) * pick(1, 2)
    if kv_heads > tp and kv_heads % tp:
        kv_heads = tp
    heads = kv_heads * pick(1, 2, 6)
    while heads % tp:
        heads *= 2
    experts = ep * pick(1, 3) if moe else 0
    spec = ModelSpec(
        family="qwen3_moe" if moe else "qwen3",
        architecture="Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        num_layers=layers,
        hidden_size=pick(3, 6),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=pick(2, 4),
        intermediate_size=tp * pick(1, 3),
        moe_intermediate_size=etp * pick(1, 3) if moe else 0,
        num_experts=experts,
        experts_per_token=1 if moe else 0,
        moe_layers=flags,
        vocab_size=pick(5, 8, 13),
        max_position_embeddings=64,
        norm_eps=1e-6,
        rope_theta=10000.0,
        tie_embeddings=draw(st.booleans()),
        qk_norm=True,
        norm_topk_prob=True,
        attention_bias=draw(st.booleans()),
        eos_token_ids=(1,),
        pad_token_id=0,
        torch_dtype="float32",
    )
    return spec, Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp)
