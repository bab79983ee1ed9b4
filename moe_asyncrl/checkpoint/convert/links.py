"""Which rectangle of which HF tensor is which rectangle of which Megatron parameter, cut to any part of either side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moe_asyncrl.models.algebra import Block, HfTensor, shard_blocks
from moe_asyncrl.models.parameter_map import Entry


@dataclass(frozen=True, slots=True)
class Link:
    """A rectangle that both sides have, element by element the same."""

    hf: HfTensor
    hf_ranges: tuple[range, ...]
    """Along each axis of the HF tensor; steps are positive."""
    own: tuple[range, ...]
    """Along each axis of the whole Megatron parameter; steps are 1."""
    axes: tuple[int | None, ...]
    """For each axis of the HF tensor the parameter's axis; None where the tensor is a stack and this is one of it."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(len(r) for r in self.own)

    @property
    def keeps_order(self) -> bool:
        """Whether elements in C order on one side are so on the other."""
        long = [axis for axis in self.axes if axis is not None and len(self.own[axis]) > 1]
        return long == sorted(long)

    def within_own(self, axis: int, start: int, stop: int) -> Link | None:
        """The part in [start, stop) of the parameter's axis; None if there is none."""
        mine = self.own[axis]
        first, last = max(start, mine.start) - mine.start, min(stop, mine.stop) - mine.start
        return self._cut(axis, first, last) if first < last else None

    def within_hf(self, axis: int, start: int, stop: int) -> Link | None:
        """The part in [start, stop) of the HF tensor's axis; None if there is none."""
        theirs = self.hf_ranges[axis]
        first = max(0, -((theirs.start - start) // theirs.step))
        last = min(len(theirs), -((theirs.start - stop) // theirs.step))
        if first >= last:
            return None
        own = self.axes[axis]
        return self if own is None else self._cut(own, first, last)

    def _cut(self, own: int, first: int, last: int) -> Link:
        return replace(
            self,
            own=tuple(r[first:last] if axis == own else r for axis, r in enumerate(self.own)),
            hf_ranges=tuple(r[first:last] if self.axes[axis] == own else r for axis, r in enumerate(self.hf_ranges)),
        )


def links_of(entry: Entry) -> tuple[Link, ...]:
    """All of a parameter, in the order of its rows."""
    return tuple(_link(block) for block in shard_blocks(entry.op, entry.shard_axis, 0, 1))


def flat_run(shape: Sequence[int], ranges: Sequence[range]) -> int | None:
    """The first element of a rectangle in its flat array, if it lies there in one run; None if not."""
    inner = len(ranges)
    while inner and len(ranges[inner - 1]) == shape[inner - 1]:
        inner -= 1
    if any(len(r) > 1 for r in ranges[: max(0, inner - 1)]):
        return None
    if inner and ranges[inner - 1].step > 1 and len(ranges[inner - 1]) > 1:
        return None
    return sum(r.start * math.prod(shape[axis + 1 :]) for axis, r in enumerate(ranges))


def row_slabs(shape: tuple[int, ...], item: int, limit: int, bounds: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) that cut an array into slabs of at most `limit` bytes (a single row may have more).

    No slab crosses one of `bounds`. A scalar has one slab of one row.
    """
    rows = shape[0] if shape else 1
    each = max(1, limit // max(1, item * math.prod(shape[1:])))
    edges = sorted({0, rows, *bounds})
    for begin, end in pairwise(edges):
        for start in range(begin, end, each):
            yield start, min(end, start + each)


def _link(block: Block) -> Link:
    own = tuple(range(a, a + n) for a, n in zip(block.local_start, block.size, strict=True))
    axes: tuple[int | None, ...] = tuple(range(len(own)))
    if block.source.transposed:
        axes = axes[::-1]
    if block.source.index is not None:
        axes = (None, *axes)
    return Link(block.hf, block.hf_ranges, own, axes)
