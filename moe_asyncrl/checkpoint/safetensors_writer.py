"""Writing a safetensors checkpoint tensor by tensor: no more than the tensor at hand is in memory.

Offsets are laid out before the first byte of data, in the order of the safetensors library, so that the files are those
that the library itself would write.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from moe_asyncrl.checkpoint.formats.raw import DTYPES
from moe_asyncrl.checkpoint.safetensors_header import INDEX, SINGLE
from moe_asyncrl.models.algebra import HfTensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """Open files for the given tensors in `directory`; `write` each once, in any order, then `close`.

    A file takes tensors in the given order until `max_shard_bytes` would be exceeded; one file needs no index.
    """

    def __init__(self, directory: Path, tensors: Sequence[HfTensor], dtype: torch.dtype, max_shard_bytes: int) -> None:
        self._dtype = dtype
        self._stack = ExitStack()
        self._places: dict[str, tuple[int, int, HfTensor]] = {}
        shards = list(_split(tensors, dtype, max_shard_bytes))
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = self._stack.enter_context((directory / name).open("wb"))
            header, starts = _header(shard, dtype)
            file.write(header)
            file.flush()
            for tensor in shard:
                self._places[tensor.name] = (file.fileno(), len(header) + starts[tensor.name], tensor)
                weight_map[tensor.name] = name
        self._files = [self._places[shard[0].name][0] for shard in shards]
        if len(shards) > 1:
            total = sum(tensor.numel * _type(tensor, dtype).itemsize for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write one tensor. Raises ValueError if its shape or dtype is not the announced one, or if it came before."""
        if name not in self._places:
            raise ValueError(f"{name} was not announced, or is written twice")
        file, offset, tensor = self._places[name]
        dtype = _type(tensor, self._dtype)
        if tuple(value.shape) != tensor.shape or value.dtype != dtype:
            raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}, announced {dtype} {tensor.shape}")
        del self._places[name]
        data = memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Bring everything to the disk. Raises ValueError if a tensor was never written."""
        if self._places:
            raise ValueError(f"{len(self._places)} tensors were never written, {next(iter(self._places))} among them")
        for file in self._files:
            os.fsync(file)
        self._stack.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _split(tensors: Sequence[HfTensor], dtype: torch.dtype, max_bytes: int) -> Iterator[list[HfTensor]]:
    shard: list[HfTensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel * _type(tensor, dtype).itemsize
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    if shard:
        yield shard


def _header(tensors: Sequence[HfTensor], dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """The header with its length, padded to 8 bytes, and each tensor's offset behind it."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    # The library's order: larger types first, so that each tensor stands at a multiple of its item size.
    for tensor in sorted(tensors, key=lambda t: (-_type(t, dtype).itemsize, t.name)):
        starts[tensor.name] = end
        own = _type(tensor, dtype)
        size = tensor.numel * own.itemsize
        content[tensor.name] = {"dtype": _NAMES[own], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts


def _type(tensor: HfTensor, dtype: torch.dtype) -> torch.dtype:
    found: torch.dtype = dtype if tensor.dtype is None else getattr(torch, tensor.dtype)
    return found
