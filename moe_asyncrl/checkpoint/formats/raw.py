"""The safetensors files of a directory as they are stored: names, shapes and types at once, data only where asked for.

File format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from moe_asyncrl.data.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "U8": torch.uint8,
        "I64": torch.int64,
    }
)
PLAIN = ("F32", "BF16", "F16")
"""Types of weights that are read as they are."""
_MAX_HEADER = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The type that reading gives: bfloat16 for weights that are stored quantised."""
    file: Path
    """Where its data is; of quantised weights the codes."""
    form: Literal["plain", "fp8", "mxfp4"] = "plain"
    """How it is stored. Only a plain tensor's bytes in the file are its values."""


class RawFiles:
    """The open files of a checkpoint, which stay open until `close`.

    Raises:
        UserError: no checkpoint in the directory, a missing or truncated file, an index that disagrees with its files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(_read_headers(directory))
        self._open: dict[Path, Any] = {}

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or the rectangle of it that `slices` names; nothing outside of it is read from the file.

        Raises UserError if its file cannot be read.
        """
        stored = self.tensors[name]
        try:
            handle = self._open.get(stored.file)
            if handle is None:
                handle = self._open[stored.file] = safe_open(stored.file, framework="pt")
            if slices is None:
                value = handle.get_tensor(name)
            else:
                # The library takes no steps: the run around them is read, and thinned here.
                value = handle.get_slice(name)[tuple(slice(s.start, s.stop) for s in slices)]
                value = value[tuple(slice(None, None, s.step) for s in slices)]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{stored.file}: cannot read tensor {name}: {error}") from error
        assert isinstance(value, torch.Tensor)
        return value


def unknown_type(file: Path, name: str, dtype: str) -> UserError:
    """The error for a tensor of a type that has no meaning here."""
    return UserError(f"{file}: tensor {name} has type {dtype}, only {', '.join(PLAIN)} are supported as they are")


def has_weights(directory: Path) -> bool:
    """Whether there are safetensors files in it, whole or not."""
    return (directory / INDEX).is_file() or (directory / SINGLE).is_file()


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
            raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read")
        return {t.name: t for t in _read_header(directory / SINGLE)}
    weight_map = _read_weight_map(directory / INDEX)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        path = directory / name
        if not path.is_file():
            raise UserError(f"{directory / INDEX} names {name}, which does not exist")
        for tensor in _read_header(path):
            if weight_map.get(tensor.name) != name:
                told = f"puts into {weight_map[tensor.name]}" if tensor.name in weight_map else "does not name"
                raise UserError(f"{path} holds tensor {tensor.name}, which {INDEX} {told}")
            tensors[tensor.name] = tensor
    for tensor_name, name in weight_map.items():
        if tensor_name not in tensors:
            raise UserError(f"{directory / INDEX} puts tensor {tensor_name} into {name}, which does not hold it")
    return tensors


def _read_weight_map(path: Path) -> dict[str, str]:
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


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER
        if length >= _MAX_HEADER or 8 + length > size:
            raise UserError(f"{path} is not a complete safetensors file: {size} bytes, header cut short or damaged")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [(k, v["dtype"], tuple(v["shape"]), v["data_offsets"]) for k, v in header.items()]
            end = max((int(offsets[1]) for *_, offsets in entries), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{path} has a damaged safetensors header: {error}") from error
    if 8 + length + end != size:
        raise UserError(f"{path} is truncated or damaged: {size} bytes, its header promises {8 + length + end}")
    tensors = []
    for name, dtype, shape, _ in entries:
        if dtype not in DTYPES:
            raise unknown_type(path, name, dtype)
        tensors.append(StoredTensor(name, shape, DTYPES[dtype], path))
    return tensors
