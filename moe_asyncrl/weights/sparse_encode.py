"""Finding the elements of a piece whose bits have changed, and writing them as a blob of `sparse`.

In two steps, so that several threads can share the work: `look` reads memory, and holds up no other thread meanwhile;
`take` goes through what was found, and is NumPy in small calls, of which two threads do no more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_asyncrl.weights.sparse import BLOCK, BLOCK_BITS, HEAD, HEAD_BYTES, UNSIGNED, Bytes, Ints, bits, blocks_of

SPAN = 4096 * BLOCK
"""Elements compared at once: calls cost little beside, and a byte for each of them is no memory to speak of."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What changed in a piece."""

    blob: Bytes | None
    """For the payload of a sparse message; None: it would have been larger than allowed."""
    changed: int
    """Number of elements with other bits; where `blob` is None at least so many."""
    elements: int
    """Of the piece."""

    @property
    def fraction(self) -> float:
        """Changed elements of all."""
        return self.changed / self.elements if self.elements else 0.0


class Encoding:
    """The changes from `old` to `new`: contiguous CPU tensors of one dtype and size.

    `look`, in any thread, then `take` of what was found.
    """

    def __init__(self, old: torch.Tensor, new: torch.Tensor, *, update: bool = False) -> None:
        """`update`: make `old` equal to `new` on the way, also when giving up.

        Raises:
            ValueError: dtypes or sizes differ.
        """
        if old.dtype != new.dtype or old.numel() != new.numel():
            raise ValueError(f"{new.numel()} elements of {new.dtype} against a copy of {old.numel()} of {old.dtype}")
        self._before, self._after, self._update = bits(old), bits(new), update

    @property
    def nbytes(self) -> int:
        """Of the piece."""
        return int(self._after.nbytes)

    def look(self) -> list[Ints]:
        """Rising positions of the elements that differ, span by span, each counted within its span."""
        # Plain comparison and `nonzero` run on whole registers, and without Python's lock: words of several elements,
        # with a second look at those that differ, were slower.
        return [
            np.not_equal(self._before[start : start + SPAN], self._after[start : start + SPAN]).nonzero()[0]
            for start in self._spans
        ]

    @property
    def _spans(self) -> range:
        return range(0, len(self._after), SPAN)

    def take(self, found: Sequence[Ints], most: int) -> Encoded:
        """The changes, given what `look` found. No blob where it would have more than `most` bytes."""
        lows: list[Bytes] = []
        values: list[Bytes] = []
        blocks = np.zeros(blocks_of(len(self._after)), np.uint16)
        itemsize, changed, free = self._after.itemsize, 0, most - HEAD_BYTES - len(blocks)
        for start, where in zip(self._spans, found, strict=True):
            there = self._after[start : start + SPAN].take(where)
            if self._update:
                self._before[start : start + SPAN][where] = there
            values.append(there.view(np.uint8))
            lows.append(where.astype(np.uint8))
            in_blocks = np.bincount(where >> BLOCK_BITS)
            blocks[start >> BLOCK_BITS :][: len(in_blocks)] = in_blocks
            changed += len(where)
            if changed * (itemsize + 1) > free:
                if self._update:
                    self._before[start:] = self._after[start:]
                return Encoded(None, changed, len(self._after))
        width = 1 if not len(blocks) or int(blocks.max()) < BLOCK else 2
        head = np.frombuffer(HEAD.pack(changed, itemsize, width, bytes(4)), np.uint8)
        blob = np.concatenate([head, *values, blocks.astype(UNSIGNED[width]).view(np.uint8), *lows])
        return Encoded(blob if len(blob) <= most else None, changed, len(self._after))


def encode(old: torch.Tensor, new: torch.Tensor, *, max_fraction: float = 1.0, update: bool = False) -> Encoded:
    """The changes from `old` to `new`, in this thread. For arguments and errors see `Encoding`.

    `max_fraction`: give up when the blob would have more bytes than this part of `new`.
    """
    encoding = Encoding(old, new, update=update)
    return encoding.take(encoding.look(), int(max_fraction * encoding.nbytes))
