"""Which rectangle of which HF tensor each rank of an SGLang server keeps. Pure arithmetic.

Read off SGLang 0.5.23: `layers/linear.py` (column- and row-parallel layers, key/value heads repeated where there are
more ranks than heads), `layers/vocab_parallel_embedding.py` (rows padded to a multiple of 64), `layers/moe/
fused_moe_triton/layer.py` (experts), and the layers that each family's file in `models/` builds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import MappingProxyType

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.plan_groups import Kind, pattern_of

VOCAB_PADDING = 64
HEAD_OVER_ALL = ("minimax_m2", "mixtral")
"""Families whose output layer SGLang cuts over all ranks whatever `--enable-dp-lm-head` says."""


class Over(Enum):
    """What a tensor is cut over."""

    EVERYONE = "nothing: whole on every rank"
    NOBODY = "nothing: no rank keeps it"
    QUERIES = "the query heads of attention"
    KEYS = "its key/value heads"
    EMBEDDING = "vocabulary rows, as attention"
    HEAD = "vocabulary rows of the output layer"
    DENSE = "the feed-forward of a dense layer"
    SHARED = "the shared expert"
    EXPERT = "one expert"
    STACK = "a stack of experts: whole experts by ep rank, each cut"
    STACK_FIRST = "a stack of experts: whole experts by ep rank, for the first rank of each"


@dataclass(frozen=True, slots=True)
class Cut:
    """The axis that is cut, and over what."""

    over: Over
    axis: int = 0


WHOLE, NEVER = Cut(Over.EVERYONE), Cut(Over.NOBODY)

_ATTENTION = {
    r"self_attn\.(q_proj|q_b_proj|kv_b_proj)\.\w+": Cut(Over.QUERIES),
    r"self_attn\.[kv]_proj\.\w+": Cut(Over.KEYS),
    r"self_attn\.o_proj\.weight": Cut(Over.QUERIES, 1),
    r"self_attn\.o_proj\.bias": WHOLE,
    r"self_attn\.sinks": Cut(Over.QUERIES),
    r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.\w+": WHOLE,
    r"self_attn\.(q|k|q_a|kv_a)_(layer)?norm\.weight": WHOLE,
    r"(input|post_attention)_layernorm\.weight": WHOLE,
}
_FEED_FORWARD = {
    r"mlp\.(gate|up)_proj\.weight": Cut(Over.DENSE),
    r"mlp\.down_proj\.weight": Cut(Over.DENSE, 1),
    r"mlp\.shared_experts\.(gate|up)_proj\.weight": Cut(Over.SHARED),
    r"mlp\.shared_experts\.down_proj\.weight": Cut(Over.SHARED, 1),
    r"(mlp|block_sparse_moe)\.experts\.\*\.(gate_proj|up_proj|w1|w3)\.weight": Cut(Over.EXPERT),
    r"(mlp|block_sparse_moe)\.experts\.\*\.(down_proj|w2)\.weight": Cut(Over.EXPERT, 1),
    r"mlp\.experts\.gate_up_proj": Cut(Over.STACK, 2),
    r"mlp\.experts\.gate_up_proj_bias": Cut(Over.STACK, 1),
    r"mlp\.experts\.down_proj": Cut(Over.STACK, 1),
    # Ranks behind the first one of an expert hold zeros, so that the bias is added once.
    r"mlp\.experts\.down_proj_bias": Cut(Over.STACK_FIRST),
    r"(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias)": WHOLE,
    r"(mlp\.gate|block_sparse_moe)\.e_score_correction_bias": WHOLE,
}
_MODEL = {
    r"model\.embed_tokens\.weight": Cut(Over.EMBEDDING),
    r"lm_head\.weight": Cut(Over.HEAD),
    r"model\.norm\.weight": WHOLE,
}
RULES: Mapping[re.Pattern[str], Cut] = MappingProxyType(
    {
        **{re.compile(pattern): cut for pattern, cut in _MODEL.items()},
        **{re.compile(r"model\.layers\.\*\." + p): cut for p, cut in {**_ATTENTION, **_FEED_FORWARD}.items()},
    }
)
"""By pattern of the name. A name that no rule knows is an error: it might be cut in a way that is not known here."""

Rectangle = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What some ranks keep of a kind of groups: all the same rectangles."""

    ranks: tuple[int, ...]
    """Ranks of the server; for a kind of single experts, positions among the moe_tp ranks of the expert."""
    rectangles: tuple[tuple[int, Rectangle], ...]
    """(number in the group, what is kept of it), in order; a tensor may have several, one below the other."""


def cut_of(spec: ModelSpec, kind: Kind, tensor: HfTensor) -> Cut:
    """How a tensor is cut. Raises UserError for a name that no rule knows."""
    if kind.mtp:
        # The model itself does not keep it; a draft model would, and is not served by these plans.
        return NEVER
    pattern = pattern_of(tensor.name)
    found = [cut for rule, cut in RULES.items() if rule.fullmatch(pattern)]
    if len(found) != 1:
        raise UserError(f"weight plan: how SGLang cuts {tensor.name} of {spec.family} is not known; use mode broadcast")
    if spec.qk_norm_over_heads and pattern.endswith("_norm.weight") and ".self_attn." in pattern:
        return Cut(Over.KEYS if pattern.endswith("k_norm.weight") else Over.QUERIES)
    return found[0]


def held_by_engine(spec: ModelSpec, engine: EngineLayout, kind: Kind, row: int) -> tuple[Held, ...]:
    """What the ranks of a server keep of a kind; ranks that keep nothing are left out. `row`: of the placement.

    Raises UserError for a tensor that no rule knows.
    """
    cuts = [cut_of(spec, kind, tensor) for tensor in kind.tensors]
    alike: dict[tuple[tuple[int, Rectangle], ...], list[int]] = {}
    for rank in range(engine.moe_tp if kind.per_expert else engine.tp):
        rectangles = tuple(
            (member, rectangle)
            for member, (tensor, cut) in enumerate(zip(kind.tensors, cuts, strict=True))
            for rectangle in _kept(spec, engine, tensor, cut, rank, row)
        )
        if rectangles:
            alike.setdefault(rectangles, []).append(rank)
    return tuple(Held(tuple(ranks), rectangles) for rectangles, ranks in alike.items())


def _kept(
    spec: ModelSpec, engine: EngineLayout, tensor: HfTensor, cut: Cut, rank: int, row: int
) -> tuple[Rectangle, ...]:
    """The rectangles of one tensor on one rank."""
    whole = tuple(range(n) for n in tensor.shape)
    if cut.over is Over.NOBODY:
        return ()
    if cut.over in (Over.STACK, Over.STACK_FIRST):
        if cut.over is Over.STACK_FIRST and rank % engine.moe_tp:
            return ()
        experts = engine.experts_of(rank // engine.moe_tp, row, spec.num_experts)
        columns = list(whole[1:])
        if cut.over is Over.STACK:
            columns[cut.axis - 1] = _share(tensor, cut.axis, rank % engine.moe_tp, engine.moe_tp)
        return tuple((run, *columns) for run in _runs(experts))
    if cut.over in (Over.EMBEDDING, Over.HEAD):
        part, parts = _position(spec, engine, cut.over, rank)
        rows = _vocabulary(tensor.shape[0], part, parts)
        return ((rows, *whole[1:]),) if rows else ()
    part, parts = _position(spec, engine, cut.over, rank)
    kept = list(whole)
    kept[cut.axis] = _share(tensor, cut.axis, part, parts)
    return (tuple(kept),)


def _position(spec: ModelSpec, engine: EngineLayout, over: Over, rank: int) -> tuple[int, int]:
    """Which part of how many a rank keeps."""
    attention = (rank % engine.attention_tp, engine.attention_tp)
    everyone = (rank, engine.tp)
    if over is Over.KEYS and engine.attention_tp > spec.num_kv_heads:
        # One head on several neighbours.
        return attention[0] // (engine.attention_tp // spec.num_kv_heads), spec.num_kv_heads
    if over is Over.HEAD:
        return attention if engine.dp_lm_head and spec.family not in HEAD_OVER_ALL else everyone
    if over is Over.DENSE:
        return (0, 1) if engine.dense_replicated else everyone
    if over is Over.SHARED:
        fused = (rank % engine.moe_tp, engine.moe_tp)
        return {"tp": everyone, "replicated": (0, 1), "fused": fused}[engine.shared_expert]
    if over is Over.EXPERT:
        return rank, engine.moe_tp
    return (0, 1) if over is Over.EVERYONE else attention


def _share(tensor: HfTensor, axis: int, part: int, parts: int) -> range:
    size = tensor.shape[axis]
    if size % parts:
        raise UserError(f"engine layout: axis {axis} of {tensor.name}, {size}, does not divide over {parts} ranks")
    return range(part * (size // parts), (part + 1) * (size // parts))


def _vocabulary(rows: int, part: int, parts: int) -> range:
    """Rows are padded to a multiple of 64, or of 64 times the parts where that does not divide."""
    padding = VOCAB_PADDING if -(-rows // VOCAB_PADDING) * VOCAB_PADDING % parts == 0 else VOCAB_PADDING * parts
    share = -(-rows // padding) * padding // parts
    return range(min(part * share, rows), min((part + 1) * share, rows))


def _runs(numbers: tuple[int, ...]) -> tuple[range, ...]:
    """Ascending numbers as runs without gaps."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    return tuple(range(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(cuts) if b > a)
