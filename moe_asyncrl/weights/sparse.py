"""Deltas: the elements of a piece whose bits have changed, as positions and new values. Exact for every dtype.

Bits are compared, not numbers: -0.0 in place of 0.0 is a change, and NaNs keep their payloads. A delta holds the new
values
themselves, so applying one twice does no harm.

A blob, little-endian, for one `Part`:

    count u64 | code width u16 | item size u16 | 4 zeros | count new values | 0 or 1 zero, to an even byte | codes

A code is the distance from the changed element before (from -1 for the first), u8 or u16, whichever is smaller in all.
The greatest code (255; 65,535) is an escape: go that far, no element changed there; a 0 may follow it. So the positions
are the running sum of the codes, minus 1, where a code is no escape. Written and read without a loop over elements.
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
_HEAD_DTYPE = np.dtype([("count", "<u8"), ("width", "<u2"), ("itemsize", "<u2"), ("zeros", "<u4")])
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: as what dtype values are handed out, and parameters are to be viewed to write them."""
CHUNK = 1 << 18
"""Elements compared at once: what they need stays in a core's cache."""


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
    positions: list[Ints] = []
    values: list[Bits] = []
    changed, same = 0, np.empty(min(CHUNK, len(after)), bool)
    for start in range(0, len(after), CHUNK):
        a, b = before[start : start + CHUNK], after[start : start + CHUNK]
        where = np.not_equal(a, b, out=same[: len(b)]).nonzero()[0]
        if not len(where):
            continue
        changed += len(where)
        if HEAD_BYTES + changed * (itemsize + 1) > most:
            if update:
                before[start:] = after[start:]
            return Encoded(None, changed, len(after))
        values.append(b[where])
        if update:
            a[where] = values[-1]
        where += start
        positions.append(where)
    blob = pack(_joined(positions, np.int64), _joined(values, after.dtype))
    return Encoded(blob if len(blob) <= most else None, changed, len(after))


def pack(positions: Ints, values: Bits) -> Bytes:
    """A blob from rising positions [n] and the new bits there [n]."""
    itemsize = values.itemsize
    steps = np.diff(positions, prepend=-1)
    width, codes = _codes(steps)
    codes_at = _codes_at(len(values), itemsize)
    blob = np.empty(codes_at + codes.nbytes, np.uint8)
    blob[:HEAD_BYTES] = np.frombuffer(_HEAD.pack(len(values), width, itemsize, bytes(4)), np.uint8)
    blob[codes_at - 1 :][:1] = 0
    blob[HEAD_BYTES : HEAD_BYTES + values.nbytes] = values.view(np.uint8)
    blob[codes_at:] = codes.view(np.uint8)
    return blob


def decode(part: Part, payload: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions int64 [n] in the part row by row, new bits [n] as `RAW`) of one part of a sparse message.

    `payload` is what `open_message` gave, in host memory. Raises ValueError, naming the tensor: the blob is broken.
    """
    (found,) = decode_all([part], payload)
    return found.positions, found.values


def decode_all(parts: Sequence[Part], payload: Any, *, at_once: int = 1 << 22) -> Iterator[Changes]:
    """The changes of all parts of a sparse message, many small parts in one go. Each part comes once.

    Parts of one item size and code width come together, in the order of the message, about `at_once` changes a time
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
    _check(parts, (head["width"] != 1) & (head["width"] != 2) | (head["zeros"] != 0), "has a head that makes no sense")
    width = head["width"].astype(np.int64)
    _check(parts, head["count"] > elements.astype(np.uint64), "has more changes than the part has elements")
    count = head["count"].astype(np.int64)
    codes_at = _codes_at(count, itemsize)
    _check(parts, (nbytes < codes_at) | ((nbytes - codes_at) % width != 0), "is cut short")
    columns = np.stack([offset, codes_at, nbytes, count, elements], 1)
    order = np.lexsort((width, itemsize))
    sizes = np.cumsum(count[order]) // max(1, at_once)
    keys = np.stack([sizes, itemsize[order], width[order]])
    edges = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0)) + 1
    for which in np.split(order, edges):
        yield _decode_some(parts, data, which, columns[which], int(itemsize[which[0]]), int(width[which[0]]))


def _decode_some(parts: Sequence[Part], data: Bytes, which: Ints, columns: Ints, itemsize: int, width: int) -> Changes:
    """The changes of parts of one item size and code width. `columns`: [P, 5], see `decode_all`."""
    rows, chosen = columns.tolist(), [parts[k] for k in which]
    values = np.concatenate([data[o + HEAD_BYTES : o + HEAD_BYTES + n * itemsize] for o, _, _, n, _ in rows])
    codes = np.concatenate([data[o + at : o + end] for o, at, end, _, _ in rows]).view(_UNSIGNED[width])
    count, elements = columns[:, 3], columns[:, 4]
    ends = np.cumsum((columns[:, 2] - columns[:, 1]) // width)
    sums = np.cumsum(codes, dtype=np.int64)
    ends_in_escape = np.zeros(len(rows), bool)
    kept = codes != _escape(width)
    starts = np.concatenate([[0], np.cumsum(count)])
    if len(codes):
        before = np.concatenate([[0], np.cumsum(kept)])
        found = np.diff(before[np.concatenate([[0], ends])])
        nonempty = np.diff(ends, prepend=0) > 0
        ends_in_escape[nonempty] = ~kept[ends[nonempty] - 1]
    else:
        found = np.zeros(len(rows), np.int64)
    _check(chosen, (found != count) | ends_in_escape, "has another number of positions than of values")
    base = np.concatenate([[0], sums])[np.concatenate([[0], ends[:-1]])]
    positions = sums if len(sums) == starts[-1] else sums[kept]
    positions -= np.repeat(base + 1, count)
    if len(positions):
        last = positions[starts[1:] - 1]
        _check(chosen, (count > 0) & (last >= elements), "has positions behind the end of the part")
    return Changes(which, starts, torch.from_numpy(positions), torch.from_numpy(values).view(RAW[itemsize]))


def _codes(steps: Ints) -> tuple[int, Bits]:
    """(width, codes) for distances [n], all at least 1."""
    sizes = {w: w * (len(steps) + int((steps[steps >= _escape(w)] // _escape(w)).sum())) for w in (1, 2)}
    width = 1 if sizes[1] <= sizes[2] else 2
    escape, dtype = _escape(width), _UNSIGNED[width]
    total = sizes[width] // width
    if total == len(steps):
        return width, steps.astype(dtype)
    times, rest = np.divmod(steps, escape)
    codes = np.full(total, escape, dtype)
    codes[np.cumsum(times + 1) - 1] = rest
    return width, codes


def _escape(width: int) -> int:
    return int((1 << 8 * width) - 1)


def _codes_at(count: Any, itemsize: Any) -> Any:
    """Byte of the blob at which the codes begin: an even one."""
    return HEAD_BYTES + (count * itemsize + 1) // 2 * 2


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _check(parts: Sequence[Part], wrong: Any, what: str) -> None:
    if wrong.any():
        raise ValueError(f"the changes of {parts[int(np.argmax(wrong))].name} cannot be read: the blob {what}")
