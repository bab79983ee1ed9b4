"""Deltas: the elements of a piece whose bits have changed, as positions and new values. Exact for every dtype.

Bits are compared, not numbers: -0.0 in place of 0.0 is a change, and NaNs keep their payloads. A delta holds the new
values themselves, so applying one twice does no harm.

A blob, little-endian, for one `Part`, whose elements are counted row by row in blocks of 256:

    count u64 | item size u16 | width u16 | 4 zeros | count new values | changes in each block | count low bytes

The changes in a block are a number of `width` bytes: 1, or 2 where all 256 of a block have changed. The low byte of a
position is its place in the block. Written (`sparse_encode`) and read without a loop over elements. d changes among n
elements of b bytes take 16 + d (b + 1) + n / 256 bytes. (`benchmarks/delta_codec.py` compares this with XOR and zstd.)
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

HEAD = struct.Struct("<QHH4s")
HEAD_BYTES = HEAD.size
_HEAD_DTYPE = np.dtype([("count", "<u8"), ("itemsize", "<u2"), ("width", "<u2"), ("zeros", "<u4")])
BLOCK_BITS = 8
BLOCK = 1 << BLOCK_BITS
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: as what dtype values are handed out, and parameters are to be viewed to write them."""


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
    return np.asarray(flat.view(RAW[flat.dtype.itemsize]).numpy().view(UNSIGNED[flat.dtype.itemsize]))


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
    lows_at = blocks_at + blocks_of(elements) * width
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
        blocks = np.concatenate([data[o + at : o + end] for o, at, end, _ in rows]).view(UNSIGNED[int(width[k])])
        lows = np.concatenate([data[o + at : o + end] for o, _, at, end in rows])
        positions = _positions(chosen, starts, elements[which], blocks, lows)
        yield Changes(which, starts, torch.from_numpy(positions), torch.from_numpy(values))


def _positions(parts: Sequence[Part], starts: Ints, elements: Ints, blocks: Bits, lows: Bytes) -> Ints:
    """[n] for parts one behind the other, from the changes in each block and the low bytes. `starts`: see `Changes`."""
    per_part = blocks_of(elements)
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


def blocks_of(elements: Any) -> Any:
    """Number of blocks."""
    return (elements + BLOCK - 1) // BLOCK


def _check(parts: Sequence[Part], wrong: Any, what: str) -> None:
    if wrong.any():
        raise ValueError(f"the changes of {parts[int(np.argmax(wrong))].name} cannot be read: the blob {what}")
