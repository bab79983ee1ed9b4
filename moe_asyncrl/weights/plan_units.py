"""What of a group travels to one address: its parts with their offsets, and which blocks of the trainer fill them.

Worked out once for a kind of groups. Offsets are multiples of 64 bytes. What is larger than a bucket is cut by rows
(by runs of the next axis where one row is larger still) into chunks that each have a bucket of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_asyncrl.weights.engine_shards import Rectangle
from moe_asyncrl.weights.trainer_blocks import AXES, Ints, KindBlocks, Small

ALIGNMENT = 64
"""Bytes; no item is larger."""


@dataclass(frozen=True, slots=True)
class Unit:
    """P parts in C chunks, and Q pairs of a part and a block that have elements in common."""

    member: Small
    """[P] number of the tensor in its group."""
    low: Small
    """[P, 3] first index along each axis of the HF tensor."""
    high: Small
    """[P, 3] behind the last index."""
    chunk: Small
    """[P]"""
    offset: Ints
    """[P] bytes from the start of the chunk."""
    chunk_bytes: tuple[int, ...]
    """[C] end of each chunk's last part."""
    piece_part: Ints
    """[Q]"""
    piece_block: Ints
    """[Q] position among the blocks of the kind."""


def aligned(nbytes: int) -> int:
    """The next offset that a part may have."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def make_unit(
    rectangles: Sequence[tuple[int, Rectangle]],
    item_bytes: Sequence[int],
    blocks: KindBlocks,
    bucket_bytes: int,
    rows: int = 1,
) -> Unit:
    """Lay out the rectangles of a group, given as (number of the tensor, rectangle), one behind the other.

    What is cut is cut between `rows` rows where so many fit a bucket; rows are the last axis but one.
    """
    cutter = _Cutter(math.inf)
    for member, rectangle in rectangles:
        cutter.add(member, rectangle, item_bytes[member])
    if cutter.filled > bucket_bytes:
        cutter = _Cutter(bucket_bytes, rows)
        for member, rectangle in rectangles:
            cutter.add(member, rectangle, item_bytes[member])
    padded = [[*part, *[range(1)] * (AXES - len(part))] for part in cutter.parts]
    members = np.array(cutter.members, np.int32)
    low = np.array([[r.start for r in part] for part in padded], np.int32)
    high = np.array([[r.stop for r in part] for part in padded], np.int32)
    piece_part, piece_block = _overlaps(members, low, high, blocks)
    return Unit(
        member=members,
        low=low,
        high=high,
        chunk=np.array(cutter.chunks, np.int32),
        offset=np.array(cutter.offsets, np.int64),
        chunk_bytes=(*cutter.ends, cutter.filled),
        piece_part=piece_part,
        piece_block=piece_block,
    )


def common(low: Small, high: Small, block_low: Small, block_high: Small, step: Small) -> tuple[Small, Small]:
    """First index and number of indices that [low, high) and range(block_low, block_high, step) share, elementwise."""
    behind = np.maximum(low - block_low, 0)
    first = block_low + (behind + step - 1) // step * step
    count = np.maximum((np.minimum(high, block_high) - first + step - 1) // step, 0)
    return first, count


@dataclass(slots=True)
class _Cutter:
    """Lays parts down until a chunk of `limit` bytes is full, then begins the next one."""

    limit: float
    rows: int = 1
    filled: int = 0
    members: list[int] = field(default_factory=list)
    parts: list[Rectangle] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, member: int, rectangle: Rectangle, item: int, axis: int = 0) -> None:
        """Lay down a rectangle, cut along `axis` where it does not fit, and further in where one step does not."""
        step = math.prod(len(r) for r in rectangle[axis + 1 :]) * item
        position, stop = rectangle[axis].start, rectangle[axis].stop
        while position < stop:
            offset = aligned(self.filled)
            steps = stop - position
            if offset + steps * step > self.limit:
                steps = max(0, int(self.limit - offset) // step)
                if axis == len(rectangle) - 2 and (steps >= self.rows or self.filled):
                    steps -= steps % self.rows
            run = range(position, position + max(steps, 1))
            part = (*rectangle[:axis], run, *rectangle[axis + 1 :])
            if steps:
                self.members.append(member)
                self.parts.append(part)
                self.chunks.append(len(self.ends))
                self.offsets.append(offset)
                self.filled = offset + steps * step
            elif self.filled:
                self.ends.append(self.filled)
                self.filled = 0
                continue
            else:
                self.add(member, part, item, axis + 1)
            position = run.stop


def _overlaps(member: Small, low: Small, high: Small, blocks: KindBlocks) -> tuple[Ints, Ints]:
    """Pairs (part, block) that share elements, by part."""
    parts: list[Ints] = []
    found: list[Ints] = []
    for number in np.unique(member):
        own = np.flatnonzero(member == number)
        theirs = np.flatnonzero(blocks.member == number)
        shared = np.ones((len(own), len(theirs)), bool)
        for axis in range(AXES):
            _, count = common(
                low[own, axis][:, None],
                high[own, axis][:, None],
                blocks.low[theirs, axis][None, :],
                blocks.high[theirs, axis][None, :],
                blocks.step[theirs, axis][None, :],
            )
            shared &= count > 0
        part, block = np.nonzero(shared)
        parts.append(own[part])
        found.append(theirs[block])
    return np.concatenate(parts), np.concatenate(found)
