"""Random small models of every family, and layouts that fit them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from moe_asyncrl.models.families import family_named
from moe_asyncrl.models.features import GluSpec, MlaSpec, Mtp, MtpForm, RouterSpec
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec

DENSE = ("qwen3", "llama")
MOE = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "minimax_m2")

WITH_MTP = ("glm4_moe", "deepseek_v3")


@st.composite
def layouts(draw: st.DrawFn, moe: bool, layers: int | None = None) -> Layout:
    """A layout of at most 32 ranks; for `layers` layers if given, split unevenly in half of the cases."""

    def pick(*values: int) -> int:
        return draw(st.sampled_from(values))

    tp, cp = pick(1, 2, 4), pick(1, 2)
    stages = (1, 2, 4) if layers is None else tuple(n for n in (1, 2, 4) if n <= layers)
    pp = pick(*stages)
    vpp = pick(1, 2) if pp > 1 and (layers is None or 2 * pp <= layers) else None
    ep, etp = (pick(1, 2, 4), pick(1, 2)) if moe else (1, tp)
    if ep == 1:
        etp = tp
    dp = pick(1, 2)
    while (tp * cp * dp) % (ep * etp):
        dp *= 2
    split = None
    count = pp * (vpp or 1)
    if layers is not None and (layers % count or draw(st.booleans())):
        cuts = sorted(draw(st.permutations(range(1, layers)))[: count - 1])
        split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    return Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp, stage_layers=split)


@st.composite
def specs_and_layouts(
    draw: st.DrawFn, families: tuple[str, ...] = (*DENSE, *MOE), count: int = 1, mtp: Mtp | None = None
) -> tuple[ModelSpec, Any]:
    """A model of one of `families` and a layout, or a tuple of `count` layouts, as uneven as Megatron-Core allows.

    With `mtp`, there are multi-token-prediction layers and that is the word on them.
    """

    def pick(*values: int) -> int:
        return draw(st.sampled_from(values))

    family = draw(st.sampled_from(families))
    moe = family in MOE
    layers = pick(1, 2, 3, 4, 5, 7)
    chosen = tuple(draw(layouts(moe, layers)) for _ in range(count))
    tp, ep, etp = (max(getattr(layout, axis) for layout in chosen) for axis in ("tp", "ep", "etp"))
    flags = (moe,) * layers
    if family in ("qwen3_moe", "glm4_moe", "deepseek_v3"):
        flags = (*draw(st.lists(st.booleans(), min_size=layers - 1, max_size=layers - 1)), True)
    kv_heads = max(1, tp // pick(1, 2)) * pick(1, 2)
    if kv_heads > tp and kv_heads % tp:
        kv_heads = tp
    heads = kv_heads * pick(1, 2, 6)
    while heads % tp:
        heads *= 2
    spec = ModelSpec(
        family=family,
        architecture=family_named(family).architecture,
        num_layers=layers,
        hidden_size=pick(3, 6) * (tp if family in WITH_MTP else 1),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=pick(2, 4),
        intermediate_size=tp * pick(1, 3),
        moe_intermediate_size=max(tp, etp) * pick(1, 3) if moe else 0,
        num_experts=ep * pick(1, 3) if moe else 0,
        experts_per_token=1 if moe else 0,
        moe_layers=flags,
        vocab_size=pick(5, 8, 13),
        max_position_embeddings=64,
        norm_eps=1e-6,
        rope_theta=10000.0,
        tie_embeddings=draw(st.booleans()),
        qk_norm=family in ("qwen3", "qwen3_moe", "minimax_m2") or (family == "glm4_moe" and draw(st.booleans())),
        norm_topk_prob=True,
        attention_bias=draw(st.booleans()),
        eos_token_ids=(1,),
        pad_token_id=0,
        torch_dtype="float32",
        **_features(draw, family, layers, tp, mtp),
    )
    return spec, chosen if count > 1 else chosen[0]


def _features(draw: st.DrawFn, family: str, layers: int, tp: int, mtp: Mtp | None) -> dict[str, Any]:
    """What only one family has."""
    sigmoid = RouterSpec(scores="sigmoid", expert_bias=True)
    if family == "minimax_m2":
        return {"qk_norm_over_heads": True, "router": sigmoid}
    if family == "gpt_oss":
        return {
            "linear_biases": True,
            "attention_sinks": True,
            "sliding_window": 4,
            "windowed_layers": tuple(layer % 2 == 0 for layer in range(layers)),
            "glu": GluSpec(activation="quick_gelu", clamp=7.0, offset=1.0),
        }
    if family not in WITH_MTP:
        return {}
    found: dict[str, Any] = {
        "router": sigmoid,
        "shared_expert_size": tp * draw(st.sampled_from((0, 1, 3))),
        "mtp_layers": draw(st.sampled_from((1, 2) if mtp else (0, 1, 2))),
        "mtp": mtp or draw(st.sampled_from(("keep", "drop"))),
    }
    own_prefix = found["mtp_layers"] == 1 and draw(st.booleans())
    found["mtp_form"] = MtpForm(
        own_prefix=own_prefix, stacked=draw(st.booleans()), copies=not own_prefix and draw(st.booleans())
    )
    if family == "deepseek_v3":
        rank = draw(st.sampled_from((None, 3)))
        found["mla"] = MlaSpec(q_rank=rank, kv_rank=2, nope_dim=3, rope_dim=2, value_dim=draw(st.sampled_from((1, 4))))
    return found
