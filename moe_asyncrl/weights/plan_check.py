"""Proves a plan on metadata before a byte moves; a plan that it does not pass must not be carried out.

It is worked out from the model and the layouts anew, not from how the plan was made:

- buckets: parts lie inside, at aligned offsets, do not overlap; no bucket is larger than allowed;
- the trainer: the pieces of a part are disjoint and fill it; each comes, in every delivery, from exactly one rank, and
  that rank holds it;
- the engines: what a rank gets is exactly what it keeps, everything once; all engines of one layout get the same, so
  no copy (redundant expert, attention group, engine) is left behind;
- fused tensors: for each rank in one bucket, or in consecutive buckets of their own if they are larger than one.

Why that is enough: blocks of one tensor are disjoint and cover it (tested for every family), pieces are intersections
of a part with different blocks, and parts are runs of rows of what a rank needs; so sums of sizes and the ends of
sorted runs decide.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.weights.plan import Plan
from moe_asyncrl.weights.plan_check_engines import check_engines
from moe_asyncrl.weights.plan_units import ALIGNMENT
from moe_asyncrl.weights.trainer_blocks import AXES, Ints

SHOWN = 5
"""Errors that the message spells out."""

Say = Callable[[str], None]


def check(plan: Plan) -> None:
    """Raise UserError, with the first errors and their number, unless the plan is right."""
    found = problems(plan)
    if found:
        more = "" if len(found) <= SHOWN else f"; and {len(found) - SHOWN} more"
        raise UserError(f"the plan of the weight update is wrong: {'; '.join(found[:SHOWN])}{more}")


def problems(plan: Plan) -> list[str]:
    """Everything that is wrong with a plan, one sentence each; empty if it is right."""
    found: list[str] = []
    _check_columns(plan, found.append)
    if found:
        # Numbers that point nowhere: the other checks could not look them up.
        return found
    _check_buckets(plan, found.append)
    _check_pieces(plan, found.append)
    _check_sends(plan, found.append)
    check_engines(plan, found.append)
    return found


def _check_columns(plan: Plan, say: Say) -> None:
    """Every number names something that exists, and parts are rectangles of their tensors."""
    p, d, s = plan.parts, plan.deliveries, plan.sends
    counts = {
        "tensor": len(plan.tensors),
        "part": len(p.tensor),
        "block": len(plan.blocks.tensor),
        "bucket": len(plan.bucket_nbytes),
        "delivery": len(d.bucket),
        "set of receivers": len(plan.receivers),
        "trainer rank": plan.layout.world_size,
    }
    for what, column in (
        ("tensor", p.tensor),
        ("bucket", p.bucket),
        ("part", plan.pieces.part),
        ("block", plan.pieces.block),
        ("bucket", d.bucket),
        ("set of receivers", d.receivers),
        ("delivery", s.delivery),
        ("trainer rank", s.source),
        ("trainer rank", d.root[d.root >= 0]),
    ):
        wrong = column[(column < 0) | (column >= counts[what])]
        if len(wrong):
            say(f"there is no {what} {wrong[0]}")
    if len({len(p.tensor), len(p.low), len(p.high), len(p.bucket), len(p.offset)}) > 1:
        say("the columns of the parts have different lengths")
    for r in plan.receivers:
        for engine in r.engines:
            if not 0 <= engine < len(plan.engines):
                say(f"there is no engine {engine}")
            elif any(not 0 <= rank < plan.engines[engine].tp for rank in r.ranks or ()):
                say(f"engine {engine} has no rank {max(r.ranks or ())}")
    shapes = np.array([[*t.shape, *[1] * (AXES - len(t.shape))] for t in plan.tensors], np.int32)
    inside = np.ones(len(p.tensor), bool)
    known = (p.tensor >= 0) & (p.tensor < len(plan.tensors))
    inside[known] = ((p.low >= 0) & (p.low < p.high))[known].all(axis=1) & (
        p.high[known] <= shapes[p.tensor[known]]
    ).all(axis=1)
    for part in np.flatnonzero(~inside):
        say(f"a part of {plan.tensors[p.tensor[part]].name} is not inside of it")


def _check_buckets(plan: Plan, say: Say) -> None:
    p = plan.parts
    for bucket in np.flatnonzero(plan.bucket_nbytes > plan.bucket_bytes):
        say(f"bucket {bucket} has {plan.bucket_nbytes[bucket]} bytes, more than {plan.bucket_bytes}")
    for bucket in np.setdiff1d(np.arange(len(plan.bucket_nbytes)), p.bucket):
        say(f"bucket {bucket} holds nothing")
    for part in np.flatnonzero((p.offset % ALIGNMENT != 0) | (p.offset < 0)):
        say(f"{_at(plan, part)} starts at byte {p.offset[part]}, not a multiple of {ALIGNMENT}")
    order = np.lexsort((p.offset, p.bucket))
    end = p.offset + plan.part_nbytes
    for part in np.flatnonzero(end > plan.bucket_nbytes[p.bucket]):
        say(f"{_at(plan, part)} ends at byte {end[part]}, behind the bucket's {plan.bucket_nbytes[p.bucket[part]]}")
    first, second = order[:-1], order[1:]
    overlap = (p.bucket[first] == p.bucket[second]) & (end[first] > p.offset[second])
    for a, b in zip(first[overlap], second[overlap], strict=True):
        say(f"{_at(plan, a)} and {_name(plan, b)} overlap")


def _check_pieces(plan: Plan, say: Say) -> None:
    """The pieces of a part are different blocks of its tensor and add up to it."""
    part, block, blocks = plan.pieces.part, plan.pieces.block, plan.blocks
    foreign = plan.parts.tensor[part] != blocks.tensor[block]
    for n in np.flatnonzero(foreign):
        say(f"{_at(plan, part[n])} is to be filled from {plan.tensors[blocks.tensor[block[n]]].name}")
    count = np.prod(plan.piece_slices[1].astype(np.int64), axis=1)
    for n in np.flatnonzero((count == 0) & ~foreign):
        say(f"{_at(plan, part[n])} has a piece without elements")
    keys = np.sort(part * np.int64(len(blocks.tensor)) + block)
    for key in np.unique(keys[1:][keys[1:] == keys[:-1]]):
        say(f"{_at(plan, int(key) // len(blocks.tensor))}: a slice of it is sent twice")
    distinct = np.unique(part * np.int64(len(blocks.tensor)) + block, return_index=True)[1]
    filled = np.zeros(len(plan.parts.tensor), np.int64)
    np.add.at(filled, part[distinct], count[distinct])
    elements = np.prod((plan.parts.high - plan.parts.low).astype(np.int64), axis=1)
    for n in np.flatnonzero(filled != elements):
        say(f"{_at(plan, n)}: {filled[n]} of {elements[n]} elements are sent")


def _check_sends(plan: Plan, say: Say) -> None:
    """In every delivery each set of ranks that has pieces of the bucket sends them once, by a rank of the set."""
    blocks, d, s = plan.blocks, plan.deliveries, plan.sends
    holder = blocks.holder[plan.pieces.block]
    bucket = plan.parts.bucket[plan.pieces.part].astype(np.int64)
    width = int(max(blocks.holder.max(), s.holder.max(initial=0))) + 1
    inside = np.unique(bucket * width + holder)
    first = np.searchsorted(inside // width, np.arange(len(plan.bucket_nbytes) + 1))
    count = (first[1:] - first[:-1])[d.bucket]
    wanted = np.repeat(np.arange(len(d.bucket), dtype=np.int64), count) * width
    offset = np.arange(len(wanted)) - np.repeat(np.cumsum(count) - count, count)
    wanted += inside[np.repeat(first[:-1][d.bucket], count) + offset] % width
    sent, times = np.unique(s.delivery * np.int64(width) + s.holder, return_counts=True)
    for key in sent[times > 1]:
        say(f"bucket {d.bucket[key // width]}: the same slices are sent twice to the same receivers")
    for key in np.setdiff1d(wanted, sent):
        ranks = blocks.holders.ranks(int(key % width))
        say(f"bucket {d.bucket[key // width]}: nobody sends what rank {ranks[0]} holds of it")
    for key in np.setdiff1d(sent, wanted):
        say(f"bucket {d.bucket[key // width]}: a rank is to send what is not in it")
    for key in np.unique(s.holder * np.int64(plan.layout.world_size) + s.source):
        number, source = divmod(int(key), plan.layout.world_size)
        if source not in blocks.holders.ranks(number):
            wrong = np.flatnonzero((s.holder == number) & (s.source == source))
            say(
                f"bucket {d.bucket[s.delivery[wrong[0]]]}: rank {source} is to send slices that it does not hold, "
                f"{len(wrong)} times"
            )
    _check_roots(plan, bucket, blocks.holders.stage(holder), say)


def _check_roots(plan: Plan, bucket: Ints, stage: Ints | int, say: Say) -> None:
    """A broadcast has a root of the one stage that its bucket is from; anything else has none."""
    d = plan.deliveries
    if plan.mode == "direct":
        for n in np.flatnonzero(d.root >= 0):
            say(f"bucket {d.bucket[n]} has root {d.root[n]}, but is not broadcast")
        return
    stages = plan.layout.pp
    pairs = np.unique(bucket * stages + stage)
    whose, times = np.unique(pairs // stages, return_counts=True)
    for number in whose[times > 1]:
        say(f"bucket {number} has tensors of more than one pipeline stage")
    of_bucket = np.full(len(plan.bucket_nbytes), -1)
    of_bucket[pairs // stages] = pairs % stages
    of_root = d.root // (plan.layout.world_size // stages)
    for n in np.flatnonzero((d.root < 0) | (of_root != of_bucket[d.bucket])):
        say(f"bucket {d.bucket[n]} of stage {of_bucket[d.bucket[n]]} has root {d.root[n]}, not a rank of that stage")
    whose, count = np.unique(np.unique(d.root[d.root >= 0]) // (plan.layout.world_size // stages), return_counts=True)
    for number in whose[count > plan.roots_per_stage] if plan.roots_per_stage else ():
        say(f"stage {number} has more than {plan.roots_per_stage} roots")


def _name(plan: Plan, part: int | np.integer) -> str:
    p = plan.parts
    tensor = plan.tensors[p.tensor[part]]
    whole = all(p.high[part, a] - p.low[part, a] == n for a, n in enumerate(tensor.shape))
    where = (
        "" if whole else str([f"{p.low[part, a]}:{p.high[part, a]}" for a in range(len(tensor.shape))]).replace("'", "")
    )
    return tensor.name + where


def _at(plan: Plan, part: int | np.integer) -> str:
    return f"{_name(plan, part)} in bucket {plan.parts.bucket[part]}"
