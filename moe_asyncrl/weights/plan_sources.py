"""Who sends: spreads the bytes over all ranks that hold a copy, so that none is the bottleneck. Greedy, deterministic.

Things to send are taken with the fewest possible senders first, larger ones first among those, and each goes to the
rank that has least so far. So a rank has at most the mean of the ranks that could have sent its last thing in its
place, and that thing: `load[r] <= mean(load[s] for s in possible) + nbytes`. Nothing that was given out is moved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.weights.plan import Deliveries, Parts, Pieces, Receivers, Sends
from moe_asyncrl.weights.plan_buckets import Address, Filled
from moe_asyncrl.weights.trainer_blocks import Blocks, Holders, Ints


@dataclass(frozen=True, slots=True)
class Job:
    """Something that one of several ranks must send."""

    possible: tuple[int, ...]
    nbytes: int


def spread(jobs: Sequence[Job], ranks: int) -> list[int]:
    """The sender of each job."""
    load = [0] * ranks
    chosen = [0] * len(jobs)
    order = sorted(range(len(jobs)), key=lambda n: (len(jobs[n].possible), -jobs[n].nbytes, n))
    for number in order:
        job = jobs[number]
        sender = min(job.possible, key=load.__getitem__)
        load[sender] += job.nbytes
        chosen[number] = sender
    return chosen


@dataclass(frozen=True, slots=True)
class Contents:
    """What each set of ranks has of each bucket: rows ordered by bucket."""

    holder: Ints
    nbytes: Ints
    first: Ints
    """[number of buckets + 1] first row of each bucket."""


def contents(filled: Filled, parts: Parts, pieces: Pieces, nbytes: Ints, blocks: Blocks) -> Contents:
    """Bytes by bucket and holder; `nbytes` of each piece."""
    holder = blocks.holder[pieces.block]
    width = int(blocks.holder.max()) + 1
    key = parts.bucket[pieces.part].astype(np.int64) * width + holder
    found, inverse = np.unique(key, return_inverse=True)
    total = np.zeros(len(found), np.int64)
    np.add.at(total, inverse, nbytes)
    first = np.searchsorted(found // width, np.arange(len(filled.nbytes) + 1))
    return Contents(found % width, total, first)


def stage_roots(stage: int, layout: Layout, bound: int) -> tuple[int, ...]:
    """The ranks of a stage that may broadcast: at most `bound` (0: all), as far from each other as can be."""
    ranks = layout.world_size // layout.pp
    count = min(bound, ranks) or ranks
    return tuple(stage * ranks + i * ranks // count for i in range(count))


def root_per_bucket(
    filled: Filled, inside: Contents, everyone: Receivers, holders: Holders, layout: Layout, bound: int
) -> tuple[Deliveries, Sends, tuple[Receivers, ...]]:
    """Broadcast: one delivery for each bucket, by a root of its stage, of the ep rank that holds it where there is one.

    Pieces that the root does not have come from the nearest rank that has them: ranks of one tensor-parallel group
    are neighbours.
    """
    allowed = [stage_roots(stage, layout, bound) for stage in range(layout.pp)]
    jobs = []
    for address, size in zip(filled.addresses, filled.nbytes, strict=True):
        have = holders.ranks(int(holders.number(address.stage, address.ep, -1)))
        near = tuple(rank for rank in allowed[address.stage] if rank in have)
        jobs.append(Job(near or allowed[address.stage], size))
    roots = spread(jobs, layout.world_size)
    delivery, holder, source = [], [], []
    for bucket, root in enumerate(roots):
        for row in range(inside.first[bucket], inside.first[bucket + 1]):
            delivery.append(bucket)
            holder.append(int(inside.holder[row]))
            source.append(min(holders.ranks(holder[-1]), key=lambda rank: (abs(rank - root), rank)))
    count = len(roots)
    return (
        Deliveries(np.arange(count, dtype=np.int32), np.zeros(count, np.int32), np.array(roots, np.int32)),
        Sends(np.array(delivery, np.int32), np.array(holder, np.int64), np.array(source, np.int32)),
        (everyone,),
    )


def senders_per_receiver(
    filled: Filled, inside: Contents, engines_of: Sequence[tuple[int, ...]], holders: Holders, ranks: int
) -> tuple[Deliveries, Sends, tuple[Receivers, ...]]:
    """Direct: the receivers of a bucket are shared out over as many deliveries as there are ranks that can send it.

    `engines_of`: the engines of each layout.
    """
    known: dict[Receivers, int] = {}
    bucket_of: list[int] = []
    receivers_of: list[int] = []
    jobs: list[Job] = []
    delivery: list[int] = []
    holder: list[int] = []
    for bucket, address in enumerate(filled.addresses):
        rows = range(inside.first[bucket], inside.first[bucket + 1])
        sets = [(int(inside.holder[row]), int(inside.nbytes[row])) for row in rows]
        copies = _receivers(address, engines_of)
        count = min(copies, max(len(holders.ranks(h)) for h, _ in sets))
        for i in range(count):
            start, stop = i * copies // count, (i + 1) * copies // count
            receivers = Receivers(engines_of[address.engines], address.ranks, start, stop)
            receivers_of.append(known.setdefault(receivers, len(known)))
            for number, size in sets:
                delivery.append(len(bucket_of))
                holder.append(number)
                jobs.append(Job(holders.ranks(number), size * (stop - start)))
            bucket_of.append(bucket)
    source = spread(jobs, ranks)
    return (
        Deliveries(
            np.array(bucket_of, np.int32), np.array(receivers_of, np.int32), np.full(len(bucket_of), -1, np.int32)
        ),
        Sends(np.array(delivery, np.int32), np.array(holder, np.int64), np.array(source, np.int32)),
        tuple(known),
    )


def _receivers(address: Address, engines_of: Sequence[tuple[int, ...]]) -> int:
    assert address.ranks is not None
    return len(engines_of[address.engines]) * len(address.ranks)
