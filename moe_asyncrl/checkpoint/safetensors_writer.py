"""Writing a safetensors checkpoint tensor by tensor: no more than the tensor at hand is in memory.

Offsets are laid out before the first byte of data, in the order of the safetensors library, so that the files are those
that the library itself would write.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from moe_asyncrl.checkpoint.convert.hf_files import index_text, plan_files
from moe_asyncrl.checkpoint.safetensors_header import INDEX
from moe_asyncrl.models.algebra import HfTensor


class SafetensorsWriter:
    """Open files for the given tensors in `directory`; `write` each once, in any order, then `close`.

    A file takes tensors in the given order until `max_shard_bytes` would be exceeded; one file needs no index.
    """

    def __init__(self, directory: Path, tensors: Sequence[HfTensor], dtype: torch.dtype, max_shard_bytes: int) -> None:
        self._dtype = dtype
        self._stack = ExitStack()
        self._places: dict[str, tuple[int, int, HfTensor]] = {}
        files = plan_files(directory, [(t.name, t.shape, _type_name(t, dtype)) for t in tensors], max_shard_bytes, None)
        announced = {tensor.name: tensor for tensor in tensors}
        self._files: list[int] = []
        for planned in files:
            file = self._stack.enter_context((directory / planned.name).open("wb"))
            file.write(planned.header)
            file.flush()
            self._files.append(file.fileno())
            for stored in planned.tensors:
                assert stored.offset is not None
                self._places[stored.name] = (file.fileno(), stored.offset, announced[stored.name])
        if len(files) > 1:
            (directory / INDEX).write_text(index_text(files), encoding="utf-8")

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


def _type(tensor: HfTensor, dtype: torch.dtype) -> torch.dtype:
    found: torch.dtype = dtype if tensor.dtype is None else getattr(torch, tensor.dtype)
    return found


def _type_name(tensor: HfTensor, dtype: torch.dtype) -> str:
    return tensor.dtype or str(dtype).removeprefix("torch.")
