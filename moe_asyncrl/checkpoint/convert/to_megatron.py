"""The plan from an HF directory to a distributed checkpoint of Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_asyncrl.checkpoint.convert.contents import FileTable, parameter_content
from moe_asyncrl.checkpoint.convert.distcp import METADATA, Chunk, GlobalTensor, Slot, metadata_bytes, side_files
from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.hf_side import HfCheckpoint, kind_types
from moe_asyncrl.checkpoint.convert.keys import Keyed, LayerKeys, keyed_parameters, object_keys
from moe_asyncrl.checkpoint.convert.links import Link, links_of, row_slabs
from moe_asyncrl.checkpoint.convert.program import Piece, WriteUnit, unit_size
from moe_asyncrl.checkpoint.convert.torch_zip import ALIGNMENT, frame, saved_object
from moe_asyncrl.models.algebra import Stack
from moe_asyncrl.models.spec import ModelSpec

CHUNK_BYTES = 64 << 20
"""Largest chunk of a global tensor. A rank reads the chunks that it needs some of as a whole."""
OBJECTS_FILE = "__objects_0.distcp"


@dataclass(frozen=True)
class ToMegatron:
    """Units to carry out, and the files to write when they are done."""

    units: tuple[WriteUnit, ...]
    others: dict[str, bytes]


def plan_to_megatron(
    source: HfCheckpoint,
    spec: ModelSpec,
    layers: LayerKeys,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    unit_bytes: int | None = None,
) -> ToMegatron:
    """Every parameter once, in units of `unit_bytes` or as `unit_size` says. Raises UserError as `kind_types` does."""
    parameters = list(keyed_parameters(spec, layers))
    types = kind_types(parameters, source.tensors, source.directory)
    chunks: dict[str, list[Chunk]] = {}
    units = []
    slabs = list(_slabs(parameters, types, chunk_bytes))
    limit = unit_bytes or unit_size(sum(slab.nbytes for slab in slabs))
    for number, group in enumerate(_grouped(slabs, limit)):
        unit, found = _unit(number, group, source)
        units.append(unit)
        for key, chunk in found:
            chunks.setdefault(key, []).append(chunk)
    tensors = {
        key: GlobalTensor(key, keyed.global_shape, types[keyed.kind], tuple(chunks[key]))
        for keyed in parameters
        for key in keyed.keys
    }
    empty = saved_object([None])
    slot = Slot(OBJECTS_FILE, 0, len(empty))
    objects = dict.fromkeys(object_keys(iter(parameters)), slot)
    others = {
        OBJECTS_FILE: empty,
        METADATA: metadata_bytes(list(tensors.values()), objects),
        **dict(side_files()),
    }
    return ToMegatron(tuple(units), others)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Rows [start, stop) of a parameter: one chunk, of these sizes along the global tensor's axes."""

    keyed: Keyed
    links: tuple[Link, ...]
    dtype: str
    start: int
    stop: int
    sizes: tuple[int, ...]
    nbytes: int

    @property
    def offsets(self) -> tuple[int, ...]:
        lead = (lead.index for lead in self.keyed.lead)
        return (*lead, self.start, *(0 for _ in self.keyed.own_shape[1:]))


def _slabs(parameters: Iterable[Keyed], types: dict[str, str], chunk_bytes: int) -> Iterator[_Slab]:
    for keyed in parameters:
        op, dtype, links = keyed.entry.op, types[keyed.kind], links_of(keyed.entry)
        bounds: list[int] = []
        if isinstance(op, Stack):
            # Gate and up are read apart, so they are chunks apart.
            for source in op.sources:
                bounds.append(source.shape[0] + (bounds[-1] if bounds else 0))
        for start, stop in row_slabs(keyed.own_shape, ITEM_SIZES[dtype], chunk_bytes, bounds):
            sizes = (*(1 for _ in keyed.lead), stop - start, *keyed.own_shape[1:])
            yield _Slab(keyed, links, dtype, start, stop, sizes, math.prod(sizes) * ITEM_SIZES[dtype])


def _grouped(slabs: Iterable[_Slab], limit: int) -> Iterator[list[_Slab]]:
    group: list[_Slab] = []
    filled = 0
    for slab in slabs:
        if group and filled + slab.nbytes > limit:
            yield group
            group, filled = [], 0
        group.append(slab)
        filled += slab.nbytes
    if group:
        yield group


def _unit(number: int, slabs: Iterable[_Slab], source: HfCheckpoint) -> tuple[WriteUnit, list[tuple[str, Chunk]]]:
    """One file: its pieces one behind the other, each at a multiple of 64, and the chunks that they are."""
    table, target = FileTable(), f"__{number}_0.distcp"
    pieces: list[Piece] = []
    chunks: list[tuple[str, Chunk]] = []
    at = end = moved = 0
    for slab in slabs:
        shape = slab.keyed.own_shape
        content = parameter_content(slab.links, shape, slab.start, slab.stop, source.tensors, table)
        around = frame(slab.dtype, slab.sizes)
        end = at + len(around.head) + slab.nbytes + len(around.tail)
        pieces.append(Piece(at, content, slab.dtype, slab.sizes))
        slot = Slot(target, at, end - at)
        chunks += [(key, Chunk(slab.offsets, slab.sizes, slot)) for key in slab.keyed.keys]
        at = -(-end // ALIGNMENT) * ALIGNMENT
        moved += slab.nbytes
    return WriteUnit(number, target, table.names, tuple(pieces), end, moved), chunks


def sources_of(source: HfCheckpoint) -> Iterator[Path]:
    """The files that are read."""
    for tensor in source.tensors.values():
        yield tensor.file
