"""Finding the elements of a piece whose bits have changed, and writing them as a blob of `sparse`.

In two steps, so that several threads can share the work: `look` reads memory, and holds up no other thread meanwhile;
`take_all` goes through what it found, and is NumPy in small calls, of which two threads do no more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moe_asyncrl.weights.sparse import BLOCK, BLOCK_BITS, HEAD, HEAD_BYTES, UNSIGNED, Bits, Bytes, Ints, bits, blocks_of

Flags = npt.NDArray[np.bool_]
TOGETHER_BITS = 3
TOGETHER = 1 << TOGETHER_BITS
"""Flags of a byte each that are looked at as one integer."""
SPAN = 4096 * BLOCK
"""Elements compared at once: calls cost little beside, and both sides fit into a processor's cache."""


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

    `look` at all `spans`, in any thread, then `take_all`.
    """

    def __init__(self, old: torch.Tensor, new: torch.Tensor, *, update: bool = False) -> None:
        """`update`: make `old` equal to `new` on the way, also when giving up.

        Raises:
            ValueError: dtypes or sizes differ.
        """
        if old.dtype != new.dtype or old.numel() != new.numel():
            raise ValueError(f"{new.numel()} elements of {new.dtype} against a copy of {old.numel()} of {old.dtype}")
        self._before, self._after, self._update = bits(old), bits(new), update
        self._words = _words(self._before, self._after)

    @property
    def nbytes(self) -> int:
        """Of the piece."""
        return int(self._after.nbytes)

    @property
    def spans(self) -> range:
        """Their first elements."""
        return range(0, len(self._after), SPAN)

    def look(self, start: int) -> Flags:
        """Where the span differs: a flag for each word, or for each element where words cannot be compared."""
        a, b = self._before[start : start + SPAN], self._after[start : start + SPAN]
        whole = _whole(len(b), self._words)
        if not whole:
            return np.not_equal(a, b)
        return np.not_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64))

    def take_all(self, flags: Sequence[Flags], most: int) -> Encoded:
        """The changes, given what `look` found in each span. No blob where it would have more than `most` bytes."""
        lows: list[Bytes] = []
        values: list[Bytes] = []
        blocks = np.zeros(blocks_of(len(self._after)), np.uint16)
        itemsize, changed, free = self._after.itemsize, 0, most - HEAD_BYTES - len(blocks)
        for start, found in zip(self.spans, flags, strict=True):
            a, b = self._before[start : start + SPAN], self._after[start : start + SPAN]
            where = _differing(a, b, self._words, found)
            there = b.take(where)
            if self._update:
                a[where] = there
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
    return encoding.take_all([encoding.look(start) for start in encoding.spans], int(max_fraction * encoding.nbytes))


def _words(before: Bits, after: Bits) -> int:
    """Elements that can be compared at once, as one integer of 8 bytes."""
    aligned = before.ctypes.data % 8 == 0 and after.ctypes.data % 8 == 0
    return 8 // after.itemsize if aligned else 1


def _whole(elements: int, words: int) -> int:
    """Elements of a span that are compared as words; 0: none are."""
    group = words * TOGETHER
    return elements // group * group if words > 1 else 0


def _differing(a: Bits, b: Bits, words: int, flags: Flags) -> Ints:
    """Rising positions at which two arrays differ. `flags`: of `look`. Few are expected.

    What is looked through one by one is a small part: flags are looked at eight at a time, and elements only in the
    words that differ.
    """
    whole = _whole(len(b), words)
    if not whole:
        return flags.nonzero()[0]
    # NumPy looks through flags several times as fast as through integers.
    groups = (flags.view(np.uint64) != 0).nonzero()[0]
    if len(groups) * TOGETHER * 2 > len(flags):
        return np.not_equal(a, b).nonzero()[0]
    # Shifts and masks: NumPy's division of integers takes as long as all the rest.
    found = flags.reshape(-1, TOGETHER).take(groups, 0).reshape(-1).nonzero()[0]
    hits = (groups.take(found >> TOGETHER_BITS) << TOGETHER_BITS) | (found & (TOGETHER - 1))
    x, y = a[:whole].view(np.uint64), b[:whole].view(np.uint64)
    unequal = (x.take(hits).view(a.dtype) != y.take(hits).view(a.dtype)).nonzero()[0]
    shift = words.bit_length() - 1
    positions = (hits.take(unequal >> shift) << shift) | (unequal & (words - 1))
    if whole == len(b):
        return positions
    rest = (a[whole:] != b[whole:]).nonzero()[0]
    return np.concatenate([positions, rest + whole])
