"""Random plans of every family, and what SGLang's loaders keep, written down anew from how they narrow tensors."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
from hypothesis import strategies as st

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import NO_EXPERT_COPIES, NO_PLACEMENT, EngineLayout, check_engine_layout
from tests.models.strategies import specs_and_layouts

SIZES = tuple(
    (tp, ep, dp) for tp, ep, dp in product((1, 2, 4, 8), repeat=3) if tp % ep == 0 and tp % dp == 0 and dp <= 4
)


def fits(spec: ModelSpec, **sizes: int) -> bool:
    try:
        check_engine_layout(spec, EngineLayout(**sizes))
    except UserError:
        return False
    return True


def numbered(spec: ModelSpec) -> dict[str, np.ndarray]:
    """HF tensors in which every element of the model has a number of its own, from 1."""
    found, start = {}, 1
    for tensor in parameter_map(spec).hf_tensors():
        found[tensor.name] = np.arange(start, start + tensor.numel, dtype=np.int32).reshape(tensor.shape)
        start += tensor.numel
    return found


@st.composite
def engine_layouts(draw: st.DrawFn, spec: ModelSpec) -> EngineLayout:
    """A server that the model fits, with copies of experts and a placement of them in half of the cases."""
    possible = [(tp, ep, dp) for tp, ep, dp in SIZES if fits(spec, tp=tp, ep=ep, attention_dp=dp)]
    tp, ep, attention_dp = draw(st.sampled_from(possible))
    copies, placement = 0, ()
    if spec.is_moe and spec.family not in NO_EXPERT_COPIES and draw(st.booleans()):
        copies = ep * draw(st.integers(0, 2))
    if spec.is_moe and spec.family not in NO_PLACEMENT and draw(st.booleans()):
        rows = draw(st.sampled_from((1, spec.num_layers)))
        extra = st.lists(st.integers(0, spec.num_experts - 1), min_size=copies, max_size=copies)
        placement = tuple(tuple(draw(st.permutations([*range(spec.num_experts), *draw(extra)]))) for _ in range(rows))
    shared = ("tp", "replicated", "fused") if spec.shared_expert_size % (tp // ep) == 0 else ("tp", "replicated")
    return EngineLayout(
        tp=tp,
        ep=ep,
        attention_dp=attention_dp,
        redundant_experts=copies,
        placement=placement,
        dense_replicated=draw(st.booleans()),
        shared_expert=draw(st.sampled_from(shared)),
        dp_lm_head=draw(st.booleans()),
    )


@st.composite
def plan_cases(draw: st.DrawFn, family: str) -> tuple[ModelSpec, Layout, tuple[EngineLayout, ...], int]:
    """A model, a trainer, one to four engines of one or two layouts, and the size of a bucket."""
    spec, layout = draw(specs_and_layouts(families=(family,)))
    first, second = draw(engine_layouts(spec)), draw(engine_layouts(spec))
    engines = draw(st.sampled_from(((first,), (first, first), (first, second), (first, second, first, first))))
    return spec, layout, engines, draw(st.sampled_from((64, 200, 1000, 10**6)))


def kept(spec: ModelSpec, engine: EngineLayout, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """True for each element of an HF tensor that a rank of a server keeps: int8 `shape`."""
    mask = np.zeros(shape, bool)
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    bias = name.endswith("bias")
    found = re.match(r"model\.layers\.(\d+)\.", name)
    layer = int(found[1]) if found else 0
    if layer >= spec.num_layers or name.startswith("mtp."):
        return mask
    attention_rank, attention_size = rank % (engine.tp // engine.attention_dp), engine.tp // engine.attention_dp
    ep_rank, moe_rank, moe_size = (
        rank // (engine.tp // engine.ep),
        rank % (engine.tp // engine.ep),
        engine.tp // engine.ep,
    )

    def narrow(axis: int, index: int, size: int, of: np.ndarray = mask) -> np.ndarray:
        share = of.shape[axis] // size
        chosen = [slice(None)] * of.ndim
        chosen[axis] = slice(index * share, (index + 1) * share)
        of[tuple(chosen)] = True
        return of

    if module in ("embed_tokens", "lm_head"):
        by_attention = module == "embed_tokens" or (
            engine.dp_lm_head and spec.family in ("qwen3", "qwen3_moe", "llama", "glm4_moe", "deepseek_v3", "gpt_oss")
        )
        index, size = (attention_rank, attention_size) if by_attention else (rank, engine.tp)
        pad = 64
        if -(-shape[0] // pad) * pad % size:
            pad *= size
        share = -(-shape[0] // pad) * pad // size
        mask[index * share : (index + 1) * share] = True
        return mask
    if ".experts." in name:
        slots = (
            engine.placement[layer if len(engine.placement) > 1 else 0]
            if engine.placement
            else [slot % spec.num_experts for slot in range(spec.num_experts + engine.redundant_experts)]
        )
        local = len(slots) // engine.ep
        mine = {slots[slot] for slot in range(len(slots)) if slot // local == ep_rank}
        number = re.search(r"experts\.(\d+)\.", name)
        if number:
            if int(number[1]) in mine:
                narrow(1 if module in ("down_proj", "w2") else 0, moe_rank, moe_size)
            return mask
        for expert in mine:
            if module == "down_proj_bias":
                mask[expert] = moe_rank == 0
            else:
                narrow({"gate_up_proj": 1}.get(module, 0), moe_rank, moe_size, mask[expert])
        return mask
    if "shared_experts" in name or module in ("gate_proj", "up_proj", "down_proj"):
        index, size = rank, engine.tp
        if "shared_experts" in name:
            index, size = {"tp": (rank, engine.tp), "replicated": (0, 1), "fused": (moe_rank, moe_size)}[
                engine.shared_expert
            ]
        elif engine.dense_replicated:
            index, size = 0, 1
        return narrow(1 if module == "down_proj" else 0, index, size)
    over_heads = spec.qk_norm_over_heads
    if module in ("k_proj", "v_proj") or (module == "k_norm" and over_heads):
        if attention_size >= spec.num_kv_heads:
            return narrow(0, attention_rank // (attention_size // spec.num_kv_heads), spec.num_kv_heads)
        return narrow(0, attention_rank, attention_size)
    if module in ("q_proj", "q_b_proj", "kv_b_proj", "sinks") or (module == "q_norm" and over_heads):
        return narrow(0, attention_rank, attention_size)
    if module == "o_proj" and not bias:
        return narrow(1, attention_rank, attention_size)
    mask[...] = True
    return mask
