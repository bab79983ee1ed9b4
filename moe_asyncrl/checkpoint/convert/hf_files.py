"""Safetensors files as places of bytes: where each tensor of a directory lies, and what files a new one will have.

File format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES, SAFETENSORS, WEIGHTS
from moe_asyncrl.checkpoint.safetensors_header import SINGLE, HeaderEntry, read_headers
from moe_asyncrl.data.errors import UserError

_TYPES = {theirs: ours for ours, theirs in SAFETENSORS.items()}

Named = tuple[str, tuple[int, ...], str]
"""Name, shape and type of a tensor."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the type that reading gives."""
    file: Path
    offset: int | None
    """Byte of the file at which it begins; None where it is stored quantised: SafetensorsDir must read it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write."""

    name: str
    header: bytes
    """With its length in front; the data follows."""
    tensors: tuple[Stored, ...]
    """In the order of the data; `offset` counts from the beginning of the file."""
    size: int


def read_directory(directory: Path) -> dict[str, Stored]:
    """Every tensor by name, in the order of the files; quantised weights by their plain names.

    Raises:
        UserError: no checkpoint, a missing, truncated or damaged file, an index that disagrees with its files.
    """
    found = {entry.name: _stored(entry) for entry in read_headers(directory).values()}
    if all(tensor.dtype in WEIGHTS for tensor in found.values()):
        return found
    return _logical(directory, found)


def _logical(directory: Path, raw: Mapping[str, Stored]) -> dict[str, Stored]:
    """What SafetensorsDir makes of quantised weights and their scales."""
    from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir

    with SafetensorsDir(directory) as stored:
        return {
            t.name: raw[t.name]
            if t.name in raw and raw[t.name].dtype == str(t.dtype).removeprefix("torch.")
            else Stored(t.name, t.shape, str(t.dtype).removeprefix("torch."), t.file, None)
            for t in stored.tensors.values()
        }


def _stored(entry: HeaderEntry) -> Stored:
    if entry.dtype not in _TYPES:
        raise UserError(
            f"{entry.file}: tensor {entry.name} has type {entry.dtype}, only {', '.join(_TYPES)} can be read"
        )
    dtype = _TYPES[entry.dtype]
    if entry.size != math.prod(entry.shape) * ITEM_SIZES[dtype]:
        looks = f"{entry.dtype} {list(entry.shape)}"
        raise UserError(f"{entry.file}: tensor {entry.name} of {looks} cannot have {entry.size} bytes")
    return Stored(entry.name, entry.shape, dtype, entry.file, entry.offset)


def plan_files(
    directory: Path,
    tensors: Sequence[Named],
    max_bytes: int,
    files: Mapping[str, str] | None,
) -> list[NewFile]:
    """The files that hold `tensors`.

    `files` says for each tensor in which file it goes. Without it a file takes tensors in the given order until
    `max_bytes` would be exceeded.
    """
    groups: dict[str, list[Named]] = {}
    if files is not None:
        for tensor in tensors:
            groups.setdefault(files[tensor[0]], []).append(tensor)
        groups = dict(sorted(groups.items()))
    else:
        shards = list(_split(tensors, max_bytes))
        for number, shard in enumerate(shards, 1):
            groups[SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"] = shard
    return [_new_file(directory / name, group) for name, group in groups.items()]


def index_text(files: Iterable[NewFile]) -> str:
    """The content of the index."""
    files = list(files)
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def _split(tensors: Sequence[Named], max_bytes: int) -> Iterator[list[Named]]:
    shard: list[Named] = []
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor[1]) * ITEM_SIZES[tensor[2]]
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    if shard:
        yield shard


def _new_file(path: Path, tensors: Sequence[Named]) -> NewFile:
    """In the library's order: larger types first, so that each tensor stands at a multiple of its item size."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors, key=lambda t: (-ITEM_SIZES[t[2]], t[0]))
    ends = [0]
    for name, shape, dtype in ordered:
        ends.append(ends[-1] + math.prod(shape) * ITEM_SIZES[dtype])
        content[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    stored = tuple(
        Stored(name, shape, dtype, path, len(header) + start)
        for (name, shape, dtype), start in zip(ordered, ends[:-1], strict=True)
    )
    return NewFile(path.name, header, stored, len(header) + ends[-1])
