"""The engines' side of `plan_check`: every rank gets what it keeps, once, and fused tensors together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.plan import Plan
from moe_asyncrl.weights.plan_groups import model_groups
from moe_asyncrl.weights.plan_needs import Needs, needs_of
from moe_asyncrl.weights.plan_units import ALIGNMENT
from moe_asyncrl.weights.trainer_blocks import Ints

Say = Callable[[str], None]


def check_engines(plan: Plan, say: Say) -> None:
    """Say what engine ranks do not get, get twice, or get apart."""
    bucket, number = _delivered(plan)
    ranks = int(plan.engine_starts[-1])
    keys, times = np.unique(bucket * ranks + number, return_counts=True)
    for key in keys[times > 1]:
        say(f"bucket {key // ranks} is delivered twice to {_whom(plan, key % ranks)}")
    bucket, number = keys // ranks, keys % ranks
    for engine in dict.fromkeys(plan.engines):
        same = [n for n, other in enumerate(plan.engines) if other == engine]
        pairs = _alike(plan, engine, same, bucket, number, say)
        _check_rows(plan, same[0], pairs // engine.tp, pairs % engine.tp, say)


def _delivered(plan: Plan) -> tuple[Ints, Ints]:
    """(bucket, engine rank counted through all engines) of everything that is delivered."""
    lists = [plan.receiver_numbers[r] for r in plan.deliveries.receivers]
    counts = np.array([len(numbers) for numbers in lists], np.int64)
    bucket = np.repeat(plan.deliveries.bucket.astype(np.int64), counts)
    return bucket, np.concatenate(lists) if lists else bucket


def _alike(plan: Plan, engine: EngineLayout, same: list[int], bucket: Ints, number: Ints, say: Say) -> Ints:
    """What any engine of a layout gets, as bucket * tp + rank; engines that get less are named.

    In broadcast ranks are alike as well, and rank 0 stands for them.
    """
    starts = plan.engine_starts
    which = np.searchsorted(starts, number, side="right") - 1
    mine = np.isin(which, same)
    pairs = bucket[mine] * engine.tp + number[mine] - starts[which[mine]]
    everything = np.unique(pairs)
    if plan.mode == "broadcast":
        buckets = np.unique(everything // engine.tp)
        everything = (buckets[:, None] * engine.tp + np.arange(engine.tp)[None, :]).ravel()
    got = which[mine]
    for one in same:
        for pair in np.setdiff1d(everything, pairs[got == one], assume_unique=True):
            missing, rank = divmod(int(pair), engine.tp)
            say(f"engine {one} rank {rank} does not get bucket {missing} ({_holds(plan, missing)})")
    return everything[everything % engine.tp == 0] if plan.mode == "broadcast" else everything


def _check_rows(plan: Plan, engine: int, bucket: Ints, rank: Ints, say: Say) -> None:
    """Everything that the ranks of an engine need comes once. `bucket`, `rank`: what is delivered."""
    p = plan.parts
    layout = plan.engines[engine]
    needs = needs_of(plan.spec, layout, plan.mode)
    order = np.argsort(p.bucket, kind="stable")
    first = np.searchsorted(p.bucket[order], np.arange(len(plan.bucket_nbytes) + 1))
    count = (first[1:] - first[:-1])[bucket]
    behind = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    part = order[np.repeat(first[:-1][bucket], count) + behind]
    rank = np.repeat(rank, count)

    def whom(k: int) -> str:
        return "an engine" if plan.mode == "broadcast" else f"rank {k} of engine {engine}"

    # The need that a part is of: the last one of its rank and tensor that does not begin behind it.
    tensors, rows = np.int64(len(plan.tensors)), np.int64(max(t.shape[0] for t in plan.tensors) + 1)
    need_key = (needs.rank * tensors + needs.tensor) * rows + needs.low[:, 0]
    part_key = (rank * tensors + p.tensor[part]) * rows + p.low[part, 0]
    need = np.maximum(np.searchsorted(need_key, part_key, side="right") - 1, 0)
    inside = (needs.rank[need] == rank) & (needs.tensor[need] == p.tensor[part])
    inside &= ((p.low[part] >= needs.low[need]) & (p.high[part] <= needs.high[need])).all(axis=1)
    for n in np.flatnonzero(~inside):
        say(f"{whom(rank[n])} gets a slice of {plan.tensors[p.tensor[part[n]]].name} that it does not keep")
    part, need, rank = part[inside], need[inside], rank[inside]
    size = (needs.high - needs.low).astype(np.int64)
    own = (p.high[part] - p.low[part]).astype(np.int64)
    full = own == size[need]
    run = (full[:, 1] & full[:, 2]) | (full[:, 2] & (own[:, 0] == 1)) | (own[:, :2] == 1).all(axis=1)
    for n in np.flatnonzero(~run):
        say(f"{whom(rank[n])} gets a slice of {plan.tensors[p.tensor[part[n]]].name} that is no run of rows")
    relative = (p.low[part] - needs.low[need]).astype(np.int64)
    start = (relative[:, 0] * size[need, 1] + relative[:, 1]) * size[need, 2] + relative[:, 2]
    _check_runs(plan, needs, need, start, start + own.prod(axis=1), whom, say)
    _check_fused(plan, needs, part, rank, whom, say)


def _check_runs(
    plan: Plan, needs: Needs, need: Ints, start: Ints, end: Ints, whom: Callable[[int], str], say: Say
) -> None:
    """The runs [start, end) of each need begin where the one before ends, from its first element to its last."""
    order = np.lexsort((start, need))
    need, start, end = need[order], start[order], end[order]
    size = (needs.high - needs.low).astype(np.int64).prod(axis=1)
    new = np.r_[True, need[1:] != need[:-1]] if len(need) else np.zeros(0, bool)
    before = np.where(new, 0, np.r_[0, end[:-1]]) if len(need) else start
    last = np.r_[new[1:], True] if len(need) else new
    missing = np.setdiff1d(np.arange(len(size)), need)
    for verb, which in (
        ("does not get", np.r_[missing, need[start > before], need[last & (end < size[need])]]),
        ("gets twice", need[start < before]),
    ):
        for n in np.unique(which):
            tensor = plan.tensors[needs.tensor[n]]
            rectangle = [f"{a}:{b}" for a, b in zip(needs.low[n], needs.high[n], strict=True)][: len(tensor.shape)]
            say(f"{whom(needs.rank[n])} {verb} a slice of {tensor.name}[{', '.join(rectangle)}]")


def _check_fused(plan: Plan, needs: Needs, part: Ints, rank: Ints, whom: Callable[[int], str], say: Say) -> None:
    """The tensors of one group come in one bucket, or, larger than a bucket, in consecutive ones of their own."""
    p, model = plan.parts, model_groups(plan.spec)
    group_of = np.empty(len(plan.tensors), np.int64)
    for number, group in enumerate(model.groups):
        group_of[list(group.tensors)] = number
    groups, buckets = np.int64(len(model.groups)), np.int64(len(plan.bucket_nbytes))
    triples = np.unique((rank * groups + group_of[p.tensor[part]]) * buckets + p.bucket[part])
    whose, first, times = np.unique(triples // buckets, return_index=True, return_counts=True)
    in_bucket = np.unique(p.bucket * groups + group_of[p.tensor])
    shared = np.bincount(in_bucket // groups, minlength=int(buckets)) > 1
    nbytes = (needs.high - needs.low).astype(np.int64).prod(axis=1) * plan.item_bytes[needs.tensor]
    need_group = needs.rank * groups + group_of[needs.tensor]
    for n in np.flatnonzero(times > 1):
        own = nbytes[need_group == whose[n]]
        together = int((-(-own[:-1] // ALIGNMENT) * ALIGNMENT).sum() + own[-1]) if len(own) else 0
        used = triples[first[n] : first[n] + times[n]] % buckets
        name = model.groups[whose[n] % groups].name
        if together <= plan.bucket_bytes:
            say(f"{whom(whose[n] // groups)} gets the fused tensors of {name} in buckets {', '.join(map(str, used))}")
        elif used[-1] - used[0] + 1 != times[n] or shared[used].any():
            say(f"{whom(whose[n] // groups)}: {name} is larger than a bucket, but its buckets are not its own")


def _whom(plan: Plan, number: int) -> str:
    engine = int(np.searchsorted(plan.engine_starts, number, side="right")) - 1
    return f"engine {engine} rank {number - plan.engine_starts[engine]}"


def _holds(plan: Plan, bucket: int) -> str:
    tensors = plan.parts.tensor[plan.parts.bucket == bucket]
    return plan.tensors[tensors[0]].name if len(tensors) else "empty"
