"""How a Megatron parameter is put together from HF tensors.

A parameter is one or more *parts* stacked along axis 0; a part is a sequence of row runs taken from *sources*: whole HF
tensors, or views of them (one expert of a stack, a transposed matrix, every second row). Tensor parallelism cuts every
part into equal contiguous pieces by itself and stacks the pieces again: that is how Megatron shards a fused gate-and-up
projection, and with a single part it is plain row sharding. Everything a rank holds is thus a list of rectangular
`Block`s, each equal to a (possibly strided) rectangle of one HF tensor. Blocks are read in either direction, so a map
cannot load one way and export another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_asyncrl.data.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """The type it is stored in whatever the model's is, such as `float32`; None: the model's."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A matrix or vector inside an HF tensor. The steps are taken in the order of the fields."""

    tensor: HfTensor
    index: int | None = None
    """One entry of the first axis: an expert of a stack."""
    transposed: bool = False
    """Rows and columns change places."""
    first: int = 0
    step: int = 1
    """Of the rows, every `step`-th from `first`: gate and up that alternate."""
    count: int | None = None
    """Of these, the first so many; None: all. Gate over up in one tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As seen by the operation."""
        shape = self.tensor.shape if self.index is None else self.tensor.shape[1:]
        rows, *columns = reversed(shape) if self.transposed else shape
        found = len(range(self.first, rows, self.step))
        return (found if self.count is None else self.count, *columns)

    def rectangle(self, rows: range, columns: tuple[range, ...]) -> tuple[range, ...]:
        """Where rows and columns of the view lie along each axis of the HF tensor."""
        stored = range(self.first + rows.start * self.step, self.first + (rows.stop - 1) * self.step + 1, self.step)
        axes = (stored, *columns)
        if self.transposed:
            axes = axes[::-1]
        return axes if self.index is None else (range(self.index, self.index + 1), *axes)


Source = HfTensor | View


@dataclass(frozen=True, slots=True)
class RowRun:
    """`rows` consecutive rows of source number `source` of an operation, from row `start`."""

    source: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Block:
    """One rectangle that a local parameter and an HF tensor have in common."""

    source: View
    hf_ranges: tuple[range, ...]
    """Along each axis of the HF tensor."""
    local_start: tuple[int, ...]
    size: tuple[int, ...]
    """In the local parameter. In the HF tensor it has the same elements in the tensor's own orientation."""

    @property
    def hf(self) -> HfTensor:
        """The HF tensor."""
        return self.source.tensor

    @property
    def hf_slices(self) -> tuple[slice, ...]:
        """Where it lies in the HF tensor."""
        return tuple(slice(r.start, r.stop, r.step) for r in self.hf_ranges)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Where it lies in the local parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.local_start, self.size, strict=True))

    @property
    def hf_run(self) -> int | None:
        """The first of its elements in the flat HF tensor, if they lie there in one run; None if not."""
        inner = len(self.hf_ranges)
        while inner and len(self.hf_ranges[inner - 1]) == self.hf.shape[inner - 1]:
            inner -= 1
        if any(len(r) > 1 for r in self.hf_ranges[: max(0, inner - 1)]):
            return None
        if inner and self.hf_ranges[inner - 1].step > 1 and len(self.hf_ranges[inner - 1]) > 1:
            return None
        return sum(r.start * math.prod(self.hf.shape[axis + 1 :]) for axis, r in enumerate(self.hf_ranges))

    def to_local(self, value: torch.Tensor) -> torch.Tensor:
        """What was read at `hf_slices`, as a view in the local parameter's orientation."""
        if self.source.index is not None:
            value = value.squeeze(0)
        return value.transpose(0, 1) if self.source.transposed else value

    def to_hf(self, value: torch.Tensor) -> torch.Tensor:
        """What was read at `local_slices`, as a view in the HF tensor's orientation."""
        if self.source.transposed:
            value = value.transpose(0, 1)
        return value if self.source.index is None else value.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Copy:
    """The parameter is the source."""

    source: Source
    pads_rows: bool = False
    """Rows are padded at the end up to a multiple of the shard count (vocabulary)."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """In the order of the runs' numbers."""
        return (self.source,)

    def parts(self) -> tuple[tuple[RowRun, ...], ...]:
        """Row runs of each part."""
        return ((RowRun(0, 0, self.source.shape[0]),),)


@dataclass(frozen=True, slots=True)
class Stack:
    """Several sources stacked along axis 0, each sharded by itself: gate over up."""

    sources: tuple[Source, ...]
    pads_rows: bool = False

    def parts(self) -> tuple[tuple[RowRun, ...], ...]:
        """Row runs of each part: one part a source."""
        return tuple((RowRun(i, 0, s.shape[0]),) for i, s in enumerate(self.sources))


@dataclass(frozen=True, slots=True)
class InterleaveGroups:
    """Query, key and value rows interleaved by key/value group: q…q k v, q…q k v, … (Megatron's fused projection).

    Each of the three sources has its rows cut into `groups` equal runs.
    """

    sources: tuple[Source, Source, Source]
    groups: int
    pads_rows: bool = False

    def parts(self) -> tuple[tuple[RowRun, ...], ...]:
        """Row runs of the single part."""
        rows = tuple(s.shape[0] // self.groups for s in self.sources)
        return (tuple(RowRun(i, g * n, n) for g in range(self.groups) for i, n in enumerate(rows)),)


Op = Copy | Stack | InterleaveGroups


def tensors_of(op: Op) -> tuple[HfTensor, ...]:
    """The HF tensors that an operation takes from, each once, in order."""
    return tuple(dict.fromkeys(as_view(source).tensor for source in op.sources))


def numel_of(op: Op) -> int:
    """Elements of the whole parameter, padding not counted."""
    return sum(math.prod(source.shape) for source in op.sources)


def as_view(source: Source) -> View:
    """A whole tensor as the view of all of it."""
    return source if isinstance(source, View) else View(tensor=source)


def shard_shape(op: Op, axis: int | None, size: int) -> tuple[int, ...]:
    """Shape of one of `size` equal shards along `axis` (None: replicated). Raises UserError if it does not divide."""
    rows = sum(end - start for start, end in _part_bounds(op, axis, 0, size))
    shape = op.sources[0].shape
    if axis is None or axis == 0:
        return (rows, *shape[1:])
    if shape[axis] % size:
        raise UserError(f"{tensors_of(op)[0].name}: axis {axis} of {shape[axis]} does not divide into {size} shards")
    return (rows, *shape[1:axis], shape[axis] // size, *shape[axis + 1 :])


def shard_blocks(op: Op, axis: int | None, index: int, size: int) -> tuple[Block, ...]:
    """The blocks of shard `index` of `size` along `axis`, in the order of the local parameter.

    Rows that no block covers are padding. Raises UserError if the parameter does not divide.
    """
    return tuple(_blocks(op, axis, index, size))


def _blocks(op: Op, axis: int | None, index: int, size: int) -> Iterator[Block]:
    shape = shard_shape(op, axis, size)
    columns = tuple(range(n) for n in shape[1:])
    if axis is not None and axis > 0:
        moved = range(index * shape[axis], (index + 1) * shape[axis])
        columns = (*columns[: axis - 1], moved, *columns[axis:])
    views = tuple(as_view(source) for source in op.sources)
    local = 0
    for (start, end), runs in zip(_part_bounds(op, axis, index, size), op.parts(), strict=True):
        position = 0
        for run in runs:
            first, last = max(start, position), min(end, position + run.rows)
            if first < last:
                view, begin = views[run.source], run.start + first - position
                yield Block(
                    source=view,
                    hf_ranges=view.rectangle(range(begin, begin + last - first), columns),
                    local_start=(local + first - start, *([0] * len(columns))),
                    size=(last - first, *shape[1:]),
                )
            position += run.rows
        local += end - start


def _part_bounds(op: Op, axis: int | None, index: int, size: int) -> list[tuple[int, int]]:
    """Rows [start, end) of each part that shard `index` holds; padding counts as rows."""
    bounds = []
    for runs in op.parts():
        rows = sum(run.rows for run in runs)
        if axis != 0:
            bounds.append((0, rows))
            continue
        if rows % size and not op.pads_rows:
            raise UserError(f"{tensors_of(op)[0].name}: {rows} rows do not divide into {size} shards")
        share = -(-rows // size)
        bounds.append((index * share, (index + 1) * share))
    return bounds
