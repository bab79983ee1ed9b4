"""Which positions of a packed micro-batch stand on which rank. A pure function of the lengths and the layout.

    whole      each sequence padded to a multiple of 2 * cp, then padding up to what the ranks share out evenly
    zigzag     of each sequence, cut into 2 * cp parts, a context-parallel rank holds part `cp` and its mirror image
    routed     of those, laid end to end, a tensor-parallel rank's routers see one contiguous part (sequence parallel)

Every real position is held by exactly one context-parallel rank of each pipeline stage and data-parallel replica, and
routed by exactly one of that rank's tensor-parallel peers. Without context parallelism no sequence is padded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_asyncrl.models.layout import Layout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankPositions:
    """The n positions of one rank, in the order in which its model sees them."""

    sequence: Ints
    """int64 [n]: number of the sequence; the number behind the last one for the padding at the end."""
    position: Ints
    """int64 [n]: place in its whole sequence, counted from 0; of a real position also the number of its routing row."""
    real: npt.NDArray[np.bool_]
    """bool [n]: no padding."""
    sizes: Ints
    """int64 [sequences, and one more for padding at the end if there is some]: lengths of the whole sequences."""
    held: Ints
    """int64, as `sizes`: how many positions of each sequence this rank holds, padding included."""
    routed: slice
    """The part of the n positions that this rank's routers see."""

    @property
    def length(self) -> int:
        """n"""
        return len(self.sequence)

    def tokens_of(self, sequence: int) -> Ints:
        """Input positions of one sequence that this rank's embedding and loss need, int64, in the rank's order.

        The labels stand one token further on.
        """
        return self.position[self.real & (self.sequence == sequence)]

    def rows_of(self, sequence: int) -> Ints:
        """Routing rows of one sequence that this rank's routers need, int64, in the rank's order."""
        part = self.routed
        return self.position[part][self.real[part] & (self.sequence[part] == sequence)]


def whole_length(length: int, layout: Layout) -> int:
    """Positions that a sequence of `length` input tokens takes, over all context-parallel ranks together."""
    parts = 2 * layout.cp if layout.cp > 1 else 1
    return -(-length // parts) * parts


def positions_of_rank(lengths: Sequence[int], layout: Layout, rank: int, *, multiple: int = 1) -> RankPositions:
    """The positions of a micro-batch that stand on `rank`.

    Args:
        lengths: input tokens of each sequence (tokens less one), at least 1 each, in the micro-batch's order. Without
            any, the micro-batch is padding alone.
        layout: how the model is spread.
        rank: of the trainer.
        multiple: a further number that all positions together are a multiple of.

    Raises:
        UserError: there is no such rank.
    """
    at, cp = layout.coordinates(rank), layout.cp
    unit = math.lcm(multiple, layout.tp * cp, 2 * cp if cp > 1 else 1)
    sizes = [whole_length(n, layout) for n in lengths]
    used = sum(sizes)
    behind = max(unit, -(-used // unit) * unit) - used
    whole = np.asarray([*sizes, *([behind] if behind else [])], dtype=np.int64)
    held = whole // cp
    sequence = np.repeat(np.arange(len(whole)), held)
    column = np.arange(len(sequence)) - np.repeat(np.cumsum(held) - held, held)
    half = np.repeat(held // 2, held)
    position = np.where(column < half, at.cp * half + column, (2 * cp - at.cp - 2) * half + column)
    real = position < np.asarray([*lengths, 0], dtype=np.int64)[sequence]
    part = len(sequence) // layout.tp
    return RankPositions(
        sequence=sequence,
        position=position,
        real=real,
        sizes=whole,
        held=held,
        routed=slice(at.tp * part, (at.tp + 1) * part),
    )
