"""What the headers and the index of a safetensors checkpoint say: where each tensor is, as bytes. Without torch.

File format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data, which the
tensors fill without gaps or overlaps).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from moe_asyncrl.data.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name of the type, such as `BF16`."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Byte of the file at which it begins."""
    size: int
    """Bytes."""


def has_weights(directory: Path) -> bool:
    """Whether there are safetensors files in it, whole or not."""
    return (directory / INDEX).is_file() or (directory / SINGLE).is_file()


def read_headers(directory: Path) -> dict[str, HeaderEntry]:
    """Every tensor by name, in the order of the files.

    Raises:
        UserError: no checkpoint, a missing, truncated or damaged file, an index that disagrees with its files.
    """
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    if (directory / INDEX).is_file():
        return _indexed(directory)
    if (directory / SINGLE).is_file():
        return {entry.name: entry for entry in read_header(directory / SINGLE)}
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    more = f"; there is {shards[0]}, but an index is missing" if shards else ""
    raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read{more}")


def _indexed(directory: Path) -> dict[str, HeaderEntry]:
    weight_map = read_weight_map(directory / INDEX)
    entries: dict[str, HeaderEntry] = {}
    for name in sorted(set(weight_map.values())):
        path = directory / name
        if not path.is_file():
            raise UserError(f"{directory / INDEX} names {name}, which does not exist")
        for entry in read_header(path):
            if weight_map.get(entry.name) != name:
                told = f"puts into {weight_map[entry.name]}" if entry.name in weight_map else "does not name"
                raise UserError(f"{path} holds tensor {entry.name}, which {INDEX} {told}")
            entries[entry.name] = entry
    lost = [name for name in weight_map if name not in entries]
    if lost:
        raise UserError(
            f"{directory / INDEX} names tensors in files that do not hold them: "
            + ", ".join(f"{name} ({weight_map[name]})" for name in lost)
        )
    return entries


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name, of an index. Raises UserError."""
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


def read_header(path: Path) -> list[HeaderEntry]:
    """The tensors of a file, in the order of its header. Raises UserError if it is truncated or damaged."""
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
        found = [(k, v["dtype"], tuple(map(int, v["shape"])), *map(int, v["data_offsets"])) for k, v in header.items()]
        end = max((entry[4] for entry in found), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} has a damaged safetensors header: {error}") from error
    if 8 + length + end != size:
        raise UserError(f"{path} is truncated or damaged: {size} bytes, its header promises {8 + length + end}")
    reached = 0
    for name, _, _, first, last in sorted(found, key=lambda entry: entry[3:5]):
        if first != reached or last < first:
            raise UserError(f"{path} has a damaged safetensors header: the bytes of tensor {name} do not follow others")
        reached = last
    return [HeaderEntry(name, dtype, shape, path, 8 + length + a, b - a) for name, dtype, shape, a, b in found]
