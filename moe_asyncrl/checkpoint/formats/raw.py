"""The safetensors files of a directory as they are stored: names, shapes and types at once, data where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from moe_asyncrl.checkpoint.safetensors_header import HeaderEntry, read_headers
from moe_asyncrl.data.errors import UserError

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


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    return {entry.name: _stored(entry) for entry in read_headers(directory).values()}


def _stored(entry: HeaderEntry) -> StoredTensor:
    if entry.dtype not in DTYPES:
        raise unknown_type(entry.file, entry.name, entry.dtype)
    return StoredTensor(entry.name, entry.shape, DTYPES[entry.dtype], entry.file)
