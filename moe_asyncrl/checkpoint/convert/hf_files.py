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
from moe_asyncrl.data.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 512 * 1024 * 1024
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
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    found = _indexed(directory) if (directory / INDEX).is_file() else _single(directory)
    if all(tensor.dtype in WEIGHTS for tensor in found.values()):
        return found
    return _logical(directory, found)


def has_weights(directory: Path) -> bool:
    """Whether there are safetensors files in it, whole or not."""
    return (directory / INDEX).is_file() or (directory / SINGLE).is_file()


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


def _single(directory: Path) -> dict[str, Stored]:
    if not (directory / SINGLE).is_file():
        raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read")
    return {tensor.name: tensor for tensor in _read_header(directory / SINGLE)}


def _indexed(directory: Path) -> dict[str, Stored]:
    weight_map = read_weight_map(directory / INDEX)
    tensors: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())):
        path = directory / name
        if not path.is_file():
            raise UserError(f"{directory / INDEX} names {name}, which does not exist")
        for tensor in _read_header(path):
            if weight_map.get(tensor.name) != name:
                told = f"puts into {weight_map[tensor.name]}" if tensor.name in weight_map else "does not name"
                raise UserError(f"{path} holds tensor {tensor.name}, which {INDEX} {told}")
            tensors[tensor.name] = tensor
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise UserError(
            f"{directory / INDEX} puts {len(lost)} tensors into files that do not hold them: "
            + ", ".join(f"{name} ({weight_map[name]})" for name in lost)
        )
    return tensors


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name. Raises UserError."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise UserError(f"{path} has no `weight_map` from tensor names to file names")
    for name in set(weight_map.values()):
        if Path(name).name != name:
            raise UserError(f"{path} names the file {name!r}, which is not a plain file name in its directory")
    return weight_map


def _read_header(path: Path) -> Iterator[Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER
        if length >= _MAX_HEADER or 8 + length > size:
            raise UserError(f"{path} is not a complete safetensors file: {size} bytes, header cut short or damaged")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [
            (k, v["dtype"], tuple(map(int, v["shape"])), *map(int, v["data_offsets"])) for k, v in header.items()
        ]
        end = max((entry[4] for entry in entries), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} has a damaged safetensors header: {error}") from error
    if 8 + length + end != size:
        raise UserError(f"{path} is truncated or damaged: {size} bytes, its header promises {8 + length + end}")
    for name, dtype, shape, first, last in entries:
        if dtype not in _TYPES:
            raise UserError(f"{path}: tensor {name} has type {dtype}, only {', '.join(_TYPES)} can be read")
        if last - first != math.prod(shape) * ITEM_SIZES[_TYPES[dtype]] or first < 0:
            raise UserError(f"{path}: tensor {name} of {dtype} {list(shape)} cannot have {last - first} bytes")
        yield Stored(name, shape, _TYPES[dtype], path, 8 + length + first)


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
