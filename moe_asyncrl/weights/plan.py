"""The plan of a weight update: which trainer rank sends which slice of which HF tensor to which engine ranks.

    part    a rectangle of an HF tensor, row by row, at an offset of a bucket
    bucket  one receive buffer; the parts of tensors that a loader fuses lie in one
    piece   what a part and a block of the trainer have in common: what one rank can send of it
    delivery  a bucket and the engine ranks that get it together
    send    a delivery, a set of ranks that hold the same pieces of it, and the one of them that sends

A transfer is a send and a piece. Transfers are many (a rank's experts for each engine), so the plan keeps the five
tables above, as columns of numbers, and spells transfers out on demand.

Modes. `broadcast`: every engine rank gets every HF tensor whole. A bucket has tensors of one pipeline stage; its root,
one of the first so many ranks of that stage, has the missing pieces sent to it and broadcasts the bucket. `direct`: a
rank of an engine gets what it keeps and nothing else, from the ranks that hold it, without a root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.plan_groups import ITEM_BYTES, model_groups
from moe_asyncrl.weights.plan_units import common
from moe_asyncrl.weights.trainer_blocks import Blocks, Ints, Small, trainer_blocks

Mode = Literal["broadcast", "direct"]


@dataclass(frozen=True, slots=True)
class Parts:
    """P parts, ordered by bucket and offset."""

    tensor: Small
    """[P] number of the HF tensor in export order."""
    low: Small
    """[P, 3] first index along each axis; an axis that the tensor does not have is [0, 1)."""
    high: Small
    """[P, 3] behind the last index."""
    bucket: Small
    """[P]"""
    offset: Ints
    """[P] bytes from the start of the bucket."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Q pieces: the intersections of a part with a block of `trainer_blocks`."""

    part: Ints
    """[Q]"""
    block: Ints
    """[Q]"""


@dataclass(frozen=True, slots=True)
class Deliveries:
    """D deliveries."""

    bucket: Small
    """[D]"""
    receivers: Small
    """[D] number in the plan's `receivers`."""
    root: Small
    """[D] trainer rank that broadcasts; -1 without one."""


@dataclass(frozen=True, slots=True)
class Sends:
    """S sends."""

    delivery: Small
    """[S]"""
    holder: Ints
    """[S] set of ranks, a number of `trainer_blocks(...).holders`."""
    source: Small
    """[S] trainer rank of that set."""


@dataclass(frozen=True, slots=True)
class Receivers:
    """Engine ranks: those from `start` to `stop` of all pairs of the engines and ranks below, engine by engine."""

    engines: tuple[int, ...]
    ranks: tuple[int, ...] | None
    """None: all ranks of each engine."""
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One slice on its way."""

    source: int
    """Trainer rank."""
    tensor: HfTensor
    slice: tuple[range, ...]
    """Which elements, along each axis of the HF tensor."""
    bucket: int
    offset: int
    """Byte of the bucket at which `part` begins."""
    part: tuple[range, ...]
    """What lies there, row by row; the slice is some or all of it."""
    root: int | None
    """Trainer rank that gathers and broadcasts the bucket; None: the source sends to each receiver by itself."""
    receivers: Receivers


@dataclass(frozen=True, eq=False)
class Plan:
    """See the module. Made by `plan_make.make_plan`; checked by `plan_check.check`."""

    spec: ModelSpec
    layout: Layout
    engines: tuple[EngineLayout, ...]
    """One for each engine."""
    mode: Mode
    dtype: str
    """What tensors travel as, except those with a type of their own."""
    bucket_bytes: int
    roots_per_stage: int
    """Most ranks of a pipeline stage that broadcast, each over a group of its own; 0 for no bound."""
    parts: Parts
    pieces: Pieces
    bucket_nbytes: Ints
    """[number of buckets]"""
    deliveries: Deliveries
    sends: Sends
    receivers: tuple[Receivers, ...]

    @property
    def senders(self) -> tuple[int, ...]:
        """Trainer ranks that send to engines, ascending: each needs a group with its receivers."""
        column = self.deliveries.root if self.mode == "broadcast" else self.sends.source
        return tuple(int(rank) for rank in np.unique(column))

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        """All HF tensors in export order."""
        return model_groups(self.spec).tensors

    @property
    def blocks(self) -> Blocks:
        """What the trainer's ranks hold."""
        return trainer_blocks(self.spec, self.layout)

    @cached_property
    def item_bytes(self) -> Ints:
        """[number of tensors] bytes of an element of each."""
        return np.array([ITEM_BYTES[t.dtype or self.dtype] for t in self.tensors], np.int64)

    @cached_property
    def part_nbytes(self) -> Ints:
        """[P]"""
        elements = np.prod((self.parts.high - self.parts.low).astype(np.int64), axis=1)
        return np.asarray(elements * self.item_bytes[self.parts.tensor])

    @cached_property
    def piece_slices(self) -> tuple[Small, Small]:
        """([Q, 3] first indices, [Q, 3] numbers of indices) of each piece along the axes of its HF tensor."""
        p, b, blocks = self.pieces.part, self.pieces.block, self.blocks
        return common(self.parts.low[p], self.parts.high[p], blocks.low[b], blocks.high[b], blocks.step[b])

    @cached_property
    def piece_nbytes(self) -> Ints:
        """[Q]"""
        elements = np.prod(self.piece_slices[1].astype(np.int64), axis=1)
        return np.asarray(elements * self.item_bytes[self.parts.tensor[self.pieces.part]])

    @cached_property
    def engine_starts(self) -> Ints:
        """[number of engines + 1] number of each engine's rank 0 when the ranks of all engines are counted through."""
        return np.cumsum([0, *(engine.tp for engine in self.engines)])

    def members(self, receivers: int) -> list[tuple[int, int]]:
        """(engine, rank) of one set of receivers."""
        r = self.receivers[receivers]
        pairs = [(e, k) for e in r.engines for k in (range(self.engines[e].tp) if r.ranks is None else r.ranks)]
        return pairs[r.start : r.stop]

    @cached_property
    def receiver_numbers(self) -> tuple[Ints, ...]:
        """For each set of receivers its ranks, counted through all engines."""
        starts = [int(n) for n in self.engine_starts]
        return tuple(
            np.array([starts[engine] + rank for engine, rank in self.members(number)], np.int64)
            for number in range(len(self.receivers))
        )

    def transfers(self, *, source: int | None = None, bucket: int | None = None) -> Iterator[Transfer]:
        """All transfers, or those from one trainer rank or of one bucket, in the order of sends and pieces."""
        chosen = np.ones(len(self.sends.source), bool)
        if source is not None:
            chosen &= self.sends.source == source
        if bucket is not None:
            chosen &= self.deliveries.bucket[self.sends.delivery] == bucket
        first, count = self.piece_slices
        step, holder = self.blocks.step, self.blocks.holder[self.pieces.block]
        # Pieces are ordered by part, parts by bucket.
        bounds = np.searchsorted(self.parts.bucket[self.pieces.part], np.arange(len(self.bucket_nbytes) + 1))
        for send in np.flatnonzero(chosen):
            delivery = self.sends.delivery[send]
            number = int(self.deliveries.bucket[delivery])
            for piece in range(bounds[number], bounds[number + 1]):
                if holder[piece] != self.sends.holder[send]:
                    continue
                part, block = self.pieces.part[piece], self.pieces.block[piece]
                tensor = self.tensors[self.parts.tensor[part]]
                axes = range(len(tensor.shape))
                starts, sizes, steps = first[piece].tolist(), count[piece].tolist(), step[block].tolist()
                root = int(self.deliveries.root[delivery])
                yield Transfer(
                    source=int(self.sends.source[send]),
                    tensor=tensor,
                    slice=tuple(range(starts[a], starts[a] + (sizes[a] - 1) * steps[a] + 1, steps[a]) for a in axes),
                    bucket=number,
                    offset=int(self.parts.offset[part]),
                    part=tuple(range(int(self.parts.low[part, a]), int(self.parts.high[part, a])) for a in axes),
                    root=None if root < 0 else root,
                    receivers=self.receivers[self.deliveries.receivers[delivery]],
                )
