"""Deltas: the elements of a piece whose bits have changed, as positions and new values. Exact for every dtype.

Bits are compared, not numbers: -0.0 in place of 0.0 is a change, and NaNs keep their payloads. A delta holds the new
values themselves, so applying one twice does no harm.

A blob, little-endian, for one `Part`, whose elements are counted row by row in blocks of 256:

    count u64 | item size u16 | width u16 | 4 zeros | count new values | changes in each block | count low bytes

The changes in a block are a number of `width` bytes: 1, or 2 where all 256 of a block have changed. The low byte of a
position is its place in the block. Written and read without a loop over elements. d changes among n elements of b bytes
take 16 + d (b + 1) + n / 256 bytes. (`benchmarks/delta_codec.py` compares this with XOR and zstd.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_asyncrl.weights.message import host_bytes
from moe_asyncrl.weights.message_part import Part

Bits = npt.NDArray[Any]
"""Elements as unsigned integers of their size."""
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_HEAD = struct.Struct("<QHH4s")
HEAD_BYTES = _HEAD.size
_HEAD_DTYPE = np.dtype([("count", "<u8"), ("itemsize", "<u2"), ("width", "<u2"), ("zeros", "<u4")])
BLOCK = 1 << 8
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: as what dtype values are handed out, and parameters are to be viewed to write them."""
FLAGS = 1 << 3
"""Flags of a byte each that are looked at together."""
CHUNK = 2048 * BLOCK
"""Elements compared at once: enough that calls cost nothing beside, and memory for flags stays in a core's cache."""


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


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of some parts of a message, which have one item size."""

    which: Ints
    """[P] numbers of the parts."""
    starts: Ints
    """[P + 1] those of part `which[k]` are elements starts[k] to starts[k + 1] of what follows."""
    positions: torch.Tensor
    """[n] int64: each within its part, counted row by row; rising within a part."""
    values: torch.Tensor
    """[n] the new bits, as `RAW` of the item size."""


def bits(tensor: torch.Tensor) -> Bits:
    """[n] the elements of a contiguous CPU tensor as unsigned integers, without a copy."""
    flat = tensor.detach().reshape(-1)
    return np.asarray(flat.view(RAW[flat.dtype.itemsize]).numpy().view(_UNSIGNED[flat.dtype.itemsize]))


def encode(old: torch.Tensor, new: torch.Tensor, *, max_fraction: float = 1.0, update: bool = False) -> Encoded:
    """The changes from `old` to `new`: contiguous CPU tensors of one dtype and size.

    Args:
        max_fraction: give up when the blob would have more bytes than this part of `new`.
        update: make `old` equal to `new` on the way, also when giving up.

    Raises:
        ValueError: dtypes or sizes differ.
    """
    if old.dtype != new.dtype or old.numel() != new.numel():
        raise ValueError(f"{new.numel()} elements of {new.dtype} against a copy of {old.numel()} of {old.dtype}")
    before, after = bits(old), bits(new)
    itemsize, most = after.itemsize, int(max_fraction * after.nbytes)
    lows: list[Bytes] = []
    values: list[Bytes] = []
    blocks = np.zeros(_blocks(len(after)), np.uint16)
    changed, free = 0, most - HEAD_BYTES - len(blocks)
    compared = np.empty(min(CHUNK, len(after)), bool)
    words = _words(before, after)
    for start in range(0, len(after), CHUNK):
        a, b = before[start : start + CHUNK], after[start : start + CHUNK]
        where = _differing(a, b, words, compared)
        there = b.take(where)
        if update:
            a[where] = there
        values.append(there.view(np.uint8))
        lows.append(where.astype(np.uint8))
        found = np.bincount(where >> 8)
        blocks[start // BLOCK :][: len(found)] = found
        changed += len(where)
        if changed * (itemsize + 1) > free:
            if update:
                before[start:] = after[start:]
            return Encoded(None, changed, len(after))
    width = 1 if not len(blocks) or int(blocks.max()) < BLOCK else 2
    head = np.frombuffer(_HEAD.pack(changed, itemsize, width, bytes(4)), np.uint8)
    blob = np.concatenate([head, *values, blocks.astype(_UNSIGNED[width]).view(np.uint8), *lows])
    return Encoded(blob if len(blob) <= most else None, changed, len(after))


def _words(before: Bits, after: Bits) -> int:
    """Elements that can be compared at once, as one integer of 8 bytes."""
    aligned = before.ctypes.data % 8 == 0 and after.ctypes.data % 8 == 0
    return 8 // after.itemsize if aligned else 1


def _differing(a: Bits, b: Bits, words: int, compared: npt.NDArray[np.bool_]) -> Ints:
    """Rising positions at which two arrays differ. `compared`: memory for it. Few are expected.

    Words are compared in place of elements, and their flags looked at eight at a time: what is looked through one by
    one is a small part.
    """
    group = words * FLAGS
    whole = len(b) // group * group
    if words == 1 or not whole:
        return np.not_equal(a, b, out=compared[: len(b)]).nonzero()[0]
    x, y = a[:whole].view(np.uint64), b[:whole].view(np.uint64)
    flags = np.not_equal(x, y, out=compared[: len(x)])
    # NumPy looks through flags several times as fast as through integers.
    groups = (flags.view(np.uint64) != 0).nonzero()[0]
    if len(groups) * 2 > whole // group:
        return np.not_equal(a, b, out=compared[: len(b)]).nonzero()[0]
    # Shifts and masks, since NumPy's division of integers takes as long as all the rest: FLAGS and words are powers of 2.
    found = flags.reshape(-1, FLAGS).take(groups, 0).reshape(-1).nonzero()[0]
    hits = (groups.take(found >> 3) << 3) | (found & (FLAGS - 1))
    unequal = (x.take(hits).view(a.dtype) != y.take(hits).view(a.dtype)).nonzero()[0]
    shift = words.bit_length() - 1
    positions = (hits.take(unequal >> shift) << shift) | (unequal & (words - 1))
    if whole == len(b):
        return positions
    rest = (a[whole:] != b[whole:]).nonzero()[0]
    return np.concatenate([positions, rest + whole])


def decode(part: Part, payload: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions int64 [n] in the part row by row, new bits [n] as `RAW`) of one part of a sparse message.

    `payload` is what `open_message` gave, in host memory. Raises ValueError, naming the tensor: the blob is broken.
    """
    (found,) = decode_all([part], payload)
    return found.positions, found.values


def decode_all(parts: Sequence[Part], payload: Any, *, at_once: int = 1 << 22) -> Iterator[Changes]:
    """The changes of all parts of a sparse message, many small parts in one go. Each part comes once.

    Parts of one item size and width come together, in the order of the message, about `at_once` changes a time
    (40 bytes of memory for each).

    Raises:
        ValueError: a blob is broken; names the tensor.
    """
    data = np.frombuffer(host_bytes(payload), np.uint8)
    if not parts:
        return
    offset = np.array([p.offset for p in parts], np.int64)
    nbytes = np.array([p.encoded_bytes for p in parts], np.int64)
    elements = np.array([p.elements for p in parts], np.int64)
    itemsize = np.array([p.itemsize for p in parts], np.int64)
    _check(parts, (nbytes < HEAD_BYTES) | (offset + nbytes > len(data)), "lies outside of the payload")
    head = data[offset[:, None] + np.arange(HEAD_BYTES)].view(_HEAD_DTYPE)[:, 0]
    _check(parts, head["itemsize"] != itemsize, "is of another item size")
    width = head["width"].astype(np.int64)
    _check(parts, (width != 1) & (width != 2) | (head["zeros"] != 0), "has a head that makes no sense")
    _check(parts, head["count"] > elements.astype(np.uint64), "has more changes than the part has elements")
    count = head["count"].astype(np.int64)
    blocks_at = HEAD_BYTES + count * itemsize
    lows_at = blocks_at + _blocks(elements) * width
    _check(parts, nbytes != lows_at + count, "has another length than its head says")
    columns = np.stack([offset, blocks_at, lows_at, nbytes], 1)
    order = np.lexsort((width, itemsize))
    keys = np.stack([np.cumsum(count[order]) // max(1, at_once), itemsize[order], width[order]])
    edges = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0)) + 1
    for which in np.split(order, edges):
        k = int(which[0])
        chosen = [parts[i] for i in which]
        starts = np.concatenate([[0], np.cumsum(count[which])])
        rows = columns[which].tolist()
        values = np.concatenate([data[o + HEAD_BYTES : o + at] for o, at, _, _ in rows]).view(_SIGNED[int(itemsize[k])])
        blocks = np.concatenate([data[o + at : o + end] for o, at, end, _ in rows]).view(_UNSIGNED[int(width[k])])
        lows = np.concatenate([data[o + at : o + end] for o, _, at, end in rows])
        positions = _positions(chosen, starts, elements[which], blocks, lows)
        yield Changes(which, starts, torch.from_numpy(positions), torch.from_numpy(values))


def _positions(parts: Sequence[Part], starts: Ints, elements: Ints, blocks: Bits, lows: Bytes) -> Ints:
    """[n] for parts one behind the other, from the changes in each block and the low bytes. `starts`: see `Changes`."""
    per_part = _blocks(elements)
    first = np.cumsum(per_part) - per_part
    # Most blocks have none; NumPy looks through flags several times as fast as through counts, and sums fewer of them.
    having = (blocks != 0).nonzero()[0]
    counts = blocks.take(having)
    until = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    edges = np.searchsorted(having, np.append(first, len(blocks)))
    _check(parts, until[edges[1:]] - until[edges[:-1]] != np.diff(starts), "counts its changes wrongly")
    base = having - np.repeat(first, np.diff(edges))
    positions = np.repeat(base * BLOCK, counts)
    positions += lows
    some = np.flatnonzero(np.diff(starts))
    if len(some):
        wrong = np.zeros(len(parts), bool)
        wrong[some] = np.maximum.reduceat(positions, starts[some]) >= elements[some]
        _check(parts, wrong, "has positions behind the end of the part")
    return positions


def _blocks(elements: Any) -> Any:
    return (elements + BLOCK - 1) // BLOCK


def _check(parts: Sequence[Part], wrong: Any, what: str) -> None:
    if wrong.any():
        raise ValueError(f"the changes of {parts[int(np.argmax(wrong))].name} cannot be read: the blob {what}")
