"""The plan from any checkpoint to an HF directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moe_asyncrl.checkpoint.convert.bands import Band
from moe_asyncrl.checkpoint.convert.contents import FileTable
from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.hf_files import NewFile, Stored, index_text, plan_files
from moe_asyncrl.checkpoint.convert.links import row_slabs
from moe_asyncrl.checkpoint.convert.program import Content, Piece, WriteUnit, unit_size
from moe_asyncrl.checkpoint.safetensors_header import INDEX

if TYPE_CHECKING:
    from moe_asyncrl.checkpoint.convert.fp8_form import Fp8Form

SLAB_BYTES = 16 << 20
SHARD_BYTES = 5 * 1000**3


class Checkpoint(Protocol):
    """A checkpoint of either kind, as the HF tensors that it comes to."""

    @property
    def directory(self) -> Path:
        """Where it is."""
        ...

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Every HF tensor of the model by name."""
        ...

    def content(self, name: str, start: int, stop: int, table: FileTable) -> Content:
        """Rows [start, stop) of a tensor."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


@dataclass(frozen=True)
class ToHf:
    """Files to begin with their headers, units to carry out, and files to write when they are done."""

    files: tuple[NewFile, ...]
    units: tuple[WriteUnit, ...]
    others: dict[str, bytes]


def plan_to_hf(
    source: Checkpoint,
    weight_map: Mapping[str, str] | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    unit_bytes: int | None = None,
    slab_bytes: int = SLAB_BYTES,
    form: Fp8Form | None = None,
) -> ToHf:
    """Every tensor once. `weight_map` names the file of each tensor; without it files have up to `shard_bytes`.

    `form` says what is stored of tensors that are not stored as themselves. `unit_bytes` is as `unit_size` says where
    it is not given.

    Raises:
        UserError: chunks of the source are missing or damaged.
    """
    tensors = [
        found
        for tensor in source.tensors.values()
        for found in (form.stored_tensors(tensor) if form else [(tensor.name, tensor.shape, tensor.dtype)])
    ]
    if weight_map is not None and weight_map.keys() != {name for name, *_ in tensors}:
        weight_map = None
    files = plan_files(Path(), tensors, shard_bytes, weight_map)
    limit = unit_bytes or unit_size(sum(file.size for file in files))
    units: list[WriteUnit] = []
    for file in files:
        units += _units(len(units), file, source, limit, slab_bytes, form)
    others = {INDEX: index_text(files).encode()} if len(files) > 1 or weight_map is not None else {}
    return ToHf(tuple(files), tuple(units), others)


def _units(
    number: int, file: NewFile, source: Checkpoint, unit_bytes: int, slab_bytes: int, form: Fp8Form | None
) -> Iterator[WriteUnit]:
    table, pieces, moved = FileTable(), list[Piece](), 0
    for tensor, band in _slabs(file.tensors, slab_bytes, form, source):
        size = band.size
        if pieces and moved + size > unit_bytes:
            yield WriteUnit(number, file.name, table.names, tuple(pieces), file.size, moved)
            number, table, pieces, moved = number + 1, FileTable(), [], 0
        content = source.content(band.weight, band.start, band.stop, table)
        dtype = source.tensors[band.weight].dtype
        encoded = form.encoded(tensor, band, dtype, table) if form and form.has(tensor.name) else None
        pieces.append(Piece(band.at, content, encoded=encoded))
        moved += size
    if pieces:
        yield WriteUnit(number, file.name, table.names, tuple(pieces), file.size, moved)


def _slabs(
    tensors: Iterable[Stored], limit: int, form: Fp8Form | None, source: Checkpoint
) -> Iterator[tuple[Stored, Band]]:
    """Each tensor of a file in bands of rows; those of FP8 are bands of the weight that they are made of."""
    for tensor in tensors:
        assert tensor.offset is not None
        if form and form.has(tensor.name):
            yield from ((tensor, band) for band in form.bands(tensor, source.tensors, limit))
            continue
        rows = max(1, tensor.shape[0] if tensor.shape else 1)
        each = tensor.nbytes // rows
        for start, stop in row_slabs(tensor.shape, ITEM_SIZES[tensor.dtype], limit):
            yield tensor, Band(tensor.name, start, stop, tensor.offset + start * each, (stop - start) * each)
