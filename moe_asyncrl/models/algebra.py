"""How a Megatron parameter is put together from HF tensors.

A parameter is one or more *parts* stacked along axis 0; a part is a sequence of row runs taken from HF tensors. Tensor
parallelism cuts every part into equal contiguous pieces by itself and stacks the pieces again: that is how Megatron
shards a fused gate-and-up projection, and with a single part it is plain row sharding. Everything a rank holds is thus
a list of rectangular `Block`s, each equal to a rectangle of one HF tensor. Blocks are read in either direction, so a
map cannot load one way and export another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moe_asyncrl.data.errors import UserError


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowRun:
    """`rows` consecutive rows of HF tensor number `tensor` of an operation, from row `start`."""

    tensor: int
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Block:
    """One rectangle that a local parameter and an HF tensor have in common."""

    hf: HfTensor
    hf_start: tuple[int, ...]
    local_start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def hf_slices(self) -> tuple[slice, ...]:
        """Where it lies in the HF tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.hf_start, self.size, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Where it lies in the local parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.local_start, self.size, strict=True))


@dataclass(frozen=True, slots=True)
class Copy:
    """The parameter is the HF tensor."""

    tensor: HfTensor
    pads_rows: bool = False
    """Rows are padded at the end up to a multiple of the shard count (vocabulary)."""

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        """HF tensors in the order of export."""
        return (self.tensor,)

    def parts(self) -> tuple[tuple[RowRun, ...], ...]:
        """Row runs of each part."""
        return ((RowRun(0, 0, self.tensor.shape[0]),),)


@dataclass(frozen=True, slots=True)
class Stack:
    """Several HF tensors stacked along axis 0, each sharded by itself: gate over up."""

    tensors: tuple[HfTensor, ...]
    pads_rows: bool = False

    def parts(self) -> tuple[tuple[RowRun, ...], ...]:
        """Row runs of each part: one part a tensor."""
        return tuple((RowRun(i, 0, t.shape[0]),) for i, t in enumerate(self.tensors))


@dataclass(frozen=True, slots=True)
class InterleaveGroups:
    """Query, key and value rows interleaved by key/value group: q…q k v, q…q k v, … (Megatron's fused projection).

    Each of the three tensors has its rows cut into `groups` equal runs.
    """

    tensors: tuple[HfTensor, HfTensor, HfTensor]
    groups: int
    pads_rows: bool = False

    def parts(self) -> tuple[tuple[RowRun, ...], ...]:
        """Row runs of the single part."""
        rows = tuple(t.shape[0] // self.groups for t in self.tensors)
        return (tuple(RowRun(i, g * n, n) for g in range(self.groups) for i, n in enumerate(rows)),)


Op = Copy | Stack | InterleaveGroups


def shard_shape(op: Op, axis: int | None, size: int) -> tuple[int, ...]:
    """Shape of one of `size` equal shards along `axis` (None: replicated). Raises UserError if it does not divide."""
    rows = sum(end - start for start, end in _part_bounds(op, axis, 0, size))
    shape = op.tensors[0].shape
    if axis is None or axis == 0:
        return (rows, *shape[1:])
    if shape[axis] % size:
        raise UserError(f"{op.tensors[0].name}: axis {axis} of {shape[axis]} does not divide into {size} shards")
    return (rows, *shape[1:axis], shape[axis] // size, *shape[axis + 1 :])


def shard_blocks(op: Op, axis: int | None, index: int, size: int) -> tuple[Block, ...]:
    """The blocks of shard `index` of `size` along `axis`, in the order of the local parameter.

    Rows that no block covers are padding. Raises UserError if the parameter does not divide.
    """
    return tuple(_blocks(op, axis, index, size))


def _blocks(op: Op, axis: int | None, index: int, size: int) -> Iterator[Block]:
    shape = shard_shape(op, axis, size)
    columns = shape[1:]
    column_start = [0] * len(columns)
    if axis is not None and axis > 0:
        column_start[axis - 1] = index * shape[axis]
    local = 0
    for (start, end), runs in zip(_part_bounds(op, axis, index, size), op.parts(), strict=True):
        position = 0
        for run in runs:
            first, last = max(start, position), min(end, position + run.rows)
            if first < last:
                yield Block(
                    hf=op.tensors[run.tensor],
                    hf_start=(run.start + first - position, *column_start),
                    local_start=(local + first - start, *([0] * len(columns))),
                    size=(last - first, *columns),
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
            raise UserError(f"{op.tensors[0].name}: {rows} rows do not divide into {size} shards")
        share = -(-rows // size)
        bounds.append((index * share, (index + 1) * share))
    return bounds
