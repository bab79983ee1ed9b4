"""A part of a message: which elements of which HF tensor lie at which byte of the payload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch

from moe_asyncrl.weights.plan_units import aligned

Range = tuple[int, int, int]
"""(start, stop, step), as Python's `range`."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some elements of one HF tensor. The same struct stands in the header of a message, as a msgpack array."""

    name: str
    """Of the HF tensor."""
    dtype: str
    """torch's name of it: bfloat16, float32, float8_e4m3fn, uint8, …"""
    shape: tuple[int, ...]
    """Of the WHOLE HF tensor."""
    ranges: tuple[Range, ...]
    """One for each axis: the elements of this part, row by row."""
    offset: int
    """Byte of the payload at which they begin; a multiple of the item size."""
    encoded_bytes: int = 0
    """Sparse messages: bytes of the encoded changes at `offset`. 0 in dense ones, which hold every element."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element. Raises ValueError for a name that is no torch dtype of whole bytes."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name} has the dtype {self.dtype!r}, which torch {torch.__version__} does not know")
        return dtype.itemsize

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of elements along each axis: the shape of the part."""
        return tuple(len(range(*r)) for r in self.ranges)

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.counts)

    @property
    def whole(self) -> bool:
        """The part is all of the HF tensor."""
        return self.counts == self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index the HF tensor with: `hf[part.slices]` is the part."""
        return tuple(slice(*r) for r in self.ranges)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payload that the part takes."""
        return self.encoded_bytes or self.elements * self.itemsize


def whole_part(name: str, dtype: str, shape: Sequence[int], offset: int = 0) -> Part:
    """A part that is all of an HF tensor."""
    return Part(name, dtype, tuple(shape), tuple((0, n, 1) for n in shape), offset)


def place_parts(parts: Iterable[Part]) -> tuple[tuple[Part, ...], int]:
    """The same parts one behind the other at multiples of 64 bytes, and the bytes of the payload they fill."""
    placed, end = [], 0
    for part in parts:
        placed.append(msgspec.structs.replace(part, offset=aligned(end)))
        end = placed[-1].offset + part.stored_bytes
    return tuple(placed), end


def check_parts(parts: Sequence[Part], *, sparse: bool, payload_bytes: int | None = None) -> None:
    """Raises ValueError, naming the tensor, unless the parts lie in order, apart and inside of payload and tensors."""
    end = 0
    for part in parts:
        if len(part.ranges) != len(part.shape):
            raise ValueError(f"{part.name} has {len(part.shape)} axes and {len(part.ranges)} ranges")
        for (start, stop, step), size in zip(part.ranges, part.shape, strict=True):
            if step < 1 or not 0 <= start <= stop <= size:
                raise ValueError(f"{part.name}: range {start}:{stop}:{step} is not inside of an axis of {size}")
        if sparse != (part.encoded_bytes > 0):
            raise ValueError(f"{part.name} has {part.encoded_bytes} encoded bytes in a {_kind(sparse)} message")
        if part.offset % part.itemsize:
            raise ValueError(f"{part.name} begins at byte {part.offset}, not a multiple of {part.itemsize}")
        if part.offset < end:
            raise ValueError(f"{part.name} begins at byte {part.offset}, where the part before it ends at {end}")
        end = part.offset + part.stored_bytes
    if payload_bytes is not None and end > payload_bytes:
        raise ValueError(f"{parts[-1].name} ends at byte {end} of a payload of {payload_bytes}")


def part_view(part: Part, payload: torch.Tensor) -> torch.Tensor:
    """The elements of a dense part as a view of the payload (uint8, [bytes]): its dtype, shape `part.counts`."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return payload[part.offset : part.offset + part.stored_bytes].view(dtype).view(part.counts)


def _kind(sparse: bool) -> str:
    return "sparse" if sparse else "dense"
