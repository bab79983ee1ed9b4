"""What workers are told to do: typed messages that hold files, offsets and rectangles.

A *piece* is a contiguous run of a file to write (or, in a comparison, an array to look at). Its content is either a
list of runs of other files, one behind the other, or an array put together from rectangles of stored arrays.
"""

from __future__ import annotations

import msgspec

Rectangle = tuple[tuple[int, int, int], ...]
"""(start, stop, step) along each axis, in elements."""


_LARGEST_UNIT, _SMALLEST_UNIT, _UNITS = 256 << 20, 16 << 20, 32


def unit_size(total: int) -> int:
    """Bytes of a unit of a conversion of `total` bytes: enough units to share, each worth its `fsync`.

    Whoever takes part, the units are the same, so that another number of workers can go on.
    """
    return max(_SMALLEST_UNIT, min(_LARGEST_UNIT, total // _UNITS))


class Run(msgspec.Struct, frozen=True, array_like=True):
    """`size` bytes of file number `file` of the unit, from byte `offset`."""

    file: int
    offset: int
    size: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a stored array, and where it goes."""

    file: int
    """Number of the file in the unit."""
    offset: int
    """Byte of the file at which the array begins; -1: the tensor is not stored as plain values, and is read by name."""
    shape: tuple[int, ...]
    """Of the whole stored array."""
    taken: Rectangle
    """In the stored array."""
    order: tuple[int, ...]
    """For each axis of the target the stored array's axis, or -1 for a new one. Other stored axes have one element."""
    placed: Rectangle
    """In the target."""
    name: str = ""
    """The tensor's name in its checkpoint, where `offset` is -1."""


class Content(msgspec.Struct, frozen=True, array_like=True):
    """An array in C order, from runs (if there are any) or from parts."""

    shape: tuple[int, ...]
    item: int
    """Bytes of a stored element."""
    runs: tuple[Run, ...]
    parts: tuple[Part, ...]
    types: tuple[str, str] | None = None
    """The type that is stored and the one that is wanted, where values change their type. `item` is of the first."""


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """The content is rows of a weight, and what is written is what FP8 stores of them."""

    folder: int
    """Number of the folder with the published scales, among the files of the unit."""
    weight: str
    first: int
    """The first row; a block begins there."""
    dtype: str
    """The type of the values."""
    stored: str
    """Which of the tensors that are stored of the weight is written."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What is written to one place of the unit's target."""

    at: int
    """Byte of the target at which it begins, head included."""
    content: Content
    framed: str = ""
    """A torch type: the content is written as a file of `torch.save` that holds one tensor of that type."""
    shape: tuple[int, ...] = ()
    """The framed tensor's shape."""
    encoded: Encoded | None = None
    """The content is quantised before it is written."""


class WriteUnit(msgspec.Struct, frozen=True, tag="write"):
    """Write all pieces to `target`, bring them to the disk, and say so."""

    number: int
    target: str
    files: tuple[str, ...]
    pieces: tuple[Piece, ...]
    size: int
    """Bytes that the target has in the end; it is made if it does not exist."""
    moved: int
    """Bytes of tensors among them, for the progress."""


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """Two arrays of one shape that are compared."""

    tensor: int
    """Number of the tensor that they are a part of."""
    a: Content
    b: Content


class CompareUnit(msgspec.Struct, frozen=True, tag="compare"):
    """Compare all pairs. `types`: the torch type of each side of each tensor, by its number."""

    number: int
    files: tuple[str, ...]
    pairs: tuple[Pair, ...]
    types: dict[int, tuple[str, str]]
    moved: int


Unit = WriteUnit | CompareUnit


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Bytes of tensors that a worker has dealt with since it last said so."""

    size: int


class Difference(msgspec.Struct, frozen=True, array_like=True):
    """How a part of a tensor differs."""

    tensor: int
    elements: int
    differing: int
    """Elements whose bits differ (values, where the types differ)."""
    distance: str
    """`largest` in words, since JSON has neither NaN nor infinity."""

    @property
    def largest(self) -> float:
        """Largest absolute difference; NaN if one side alone is NaN somewhere."""
        return float(self.distance)


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A unit is done, and what it wrote is on the disk."""

    number: int
    differences: tuple[Difference, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A unit cannot be done. `text` is for people; `number` of the system's error, 0 where what is read is damaged."""

    text: str
    number: int = 0


Answer = Moved | Finished | Failed
