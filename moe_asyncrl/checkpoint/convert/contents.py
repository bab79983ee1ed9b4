"""From links to the contents of pieces: a slab of a Megatron parameter from HF tensors, or of an HF tensor from chunks.

Runs of whole rows become byte ranges; what is transposed, strided or stored quantised becomes rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from moe_asyncrl.checkpoint.convert.distcp import Chunk, DistcpDir, GlobalTensor
from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.hf_files import Stored
from moe_asyncrl.checkpoint.convert.links import Link, flat_run
from moe_asyncrl.checkpoint.convert.program import Content, Part, Rectangle, Run
from moe_asyncrl.data.errors import UserError


class FileTable:
    """Numbers the files of a unit."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, path: Path) -> int:
        """The number of a file; a new one for a new file."""
        return self._numbers.setdefault(str(path), len(self._numbers))

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the numbers."""
        return tuple(self._numbers)


def stored_content(stored: Stored, start: int, stop: int, table: FileTable) -> Content:
    """Rows [start, stop) of an HF tensor."""
    ranges = tuple(range(start, stop) if axis == 0 else range(n) for axis, n in enumerate(stored.shape))
    order = tuple(range(len(stored.shape)))
    part = _part_of_stored(stored, ranges, order, ranges, (start,), table)
    return _content(tuple(map(len, ranges)), ITEM_SIZES[stored.dtype], [part])


def parameter_content(
    links: Sequence[Link], shape: tuple[int, ...], start: int, stop: int, hf: Mapping[str, Stored], table: FileTable
) -> Content:
    """Rows [start, stop) of a parameter of the given shape, from the HF tensors that its links name."""
    parts = []
    item = 0
    for link in links:
        cut = link.within_own(0, start, stop)
        if cut is None:
            continue
        stored = hf[cut.hf.name]
        item = ITEM_SIZES[stored.dtype]
        order = tuple(cut.axes.index(axis) for axis in range(len(shape)))
        parts.append(_part_of_stored(stored, cut.hf_ranges, order, cut.own, (start,), table))
    return _content((stop - start, *shape[1:]), item, parts)


def tensor_content(
    links: Sequence[tuple[Link, GlobalTensor, tuple[int, ...]]],
    shape: tuple[int, ...],
    start: int,
    stop: int,
    dtype: str,
    source: DistcpDir,
    table: FileTable,
) -> Content:
    """Rows [start, stop) of an HF tensor of the given shape and type, from chunks of the parameters it is linked to.

    Each link comes with the parameter's global tensor and its indices on the axes in front.

    Raises:
        UserError: a part of it lies in no chunk, or in two.
    """
    parts = []
    stored = links[0][1].dtype
    for link, tensor, lead in links:
        cut = link.within_hf(0, start, stop)
        if cut is None:
            continue
        for chunk in source.chunks_at(tensor, lead):
            inside: Link | None = cut
            for axis in range(len(cut.own)):
                if inside is not None:
                    at = len(lead) + axis
                    inside = inside.within_own(axis, chunk.offsets[at], chunk.offsets[at] + chunk.sizes[at])
            if inside is not None:
                parts.append(_part_of_chunk(inside, tensor, chunk, lead, start, source, table))
    whole = (stop - start, *shape[1:])
    found = sum(math.prod(len(range(*axis)) for axis in part.placed) for part in parts)
    if found != math.prod(whole):
        raise UserError(
            f"{source.directory}: {links[0][1].key} has {found} of the {math.prod(whole)} elements of "
            f"{links[0][0].hf.name}, rows {start} to {stop}: chunks are missing or overlap"
        )
    content = _content(whole, ITEM_SIZES[stored], parts)
    return content if stored == dtype else msgspec.structs.replace(content, types=(stored, dtype))


def _part_of_stored(
    stored: Stored,
    ranges: tuple[range, ...],
    order: tuple[int, ...],
    placed: tuple[range, ...],
    origin: tuple[int, ...],
    table: FileTable,
) -> Part:
    return Part(
        table.number(stored.file),
        -1 if stored.offset is None else stored.offset,
        stored.shape,
        _rectangle(ranges),
        order,
        _rectangle(placed, origin),
        stored.name if stored.offset is None else "",
    )


def _part_of_chunk(
    link: Link,
    tensor: GlobalTensor,
    chunk: Chunk,
    lead: tuple[int, ...],
    start: int,
    source: DistcpDir,
    table: FileTable,
) -> Part:
    path, offset = source.payload(tensor, chunk)
    taken = (*(range(index, index + 1) for index in lead), *link.own)
    return Part(
        table.number(path),
        offset,
        chunk.sizes,
        _rectangle(taken, chunk.offsets),
        tuple(-1 if axis is None else len(lead) + axis for axis in link.axes),
        _rectangle(link.hf_ranges, (start,)),
    )


def _rectangle(ranges: Sequence[range], origin: Sequence[int] = ()) -> Rectangle:
    """Relative to `origin`, whose missing numbers are 0."""
    shifts = (*origin, *([0] * (len(ranges) - len(origin))))
    return tuple((r.start - shift, r.stop - shift, r.step) for r, shift in zip(ranges, shifts, strict=True))


def _content(shape: tuple[int, ...], item: int, parts: list[Part]) -> Content:
    runs = _as_runs(shape, item, parts)
    return Content(shape, item, runs, ()) if runs is not None else Content(shape, item, (), tuple(parts))


def _as_runs(shape: tuple[int, ...], item: int, parts: Sequence[Part]) -> tuple[Run, ...] | None:
    """The parts as byte ranges in the order of the target, neighbours joined; None if that cannot be said of them."""
    found: list[tuple[int, Run]] = []
    for part in parts:
        taken, placed = _ranges(part.taken), _ranges(part.placed)
        first, at = flat_run(part.shape, taken), flat_run(shape, placed)
        long = [axis for axis in part.order if axis >= 0 and len(taken[axis]) > 1]
        if part.offset < 0 or first is None or at is None or long != sorted(long):
            return None
        size = math.prod(map(len, placed)) * item
        found.append((at * item, Run(part.file, part.offset + first * item, size)))
    found.sort(key=lambda pair: pair[0])
    joined: list[Run] = []
    end = 0
    for at, run in found:
        if at != end:
            return None
        end += run.size
        last = joined[-1] if joined else None
        if last is not None and last.file == run.file and last.offset + last.size == run.offset:
            joined[-1] = Run(run.file, last.offset, last.size + run.size)
        else:
            joined.append(run)
    return tuple(joined) if end == math.prod(shape) * item and joined else None


def _ranges(rectangle: Rectangle) -> tuple[range, ...]:
    return tuple(range(*axis) for axis in rectangle)
