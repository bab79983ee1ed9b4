"""Reading a safetensors checkpoint, sharded or not, quantised or not: names and shapes at once, data where asked for.

Quantised weights appear under the model's own names as bfloat16, and are dequantised as they are read; their scales do
not appear. `formats` has the forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from moe_asyncrl.checkpoint.formats.logical import logical_views
from moe_asyncrl.checkpoint.formats.raw import RawFiles, StoredTensor
from moe_asyncrl.checkpoint.safetensors_header import INDEX, SINGLE, has_weights
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.hf_config import quantization_of

__all__ = ["INDEX", "SINGLE", "SafetensorsDir", "StoredTensor", "has_weights"]


class SafetensorsDir:
    """An open checkpoint. Use as a context manager; files stay open until the end.

    `raw` has the tensors as they are stored, scales among them.

    Raises:
        UserError: no checkpoint in the directory, a missing or truncated file, an index that disagrees with its files,
            quantised weights that are incomplete or that `config.json` does not announce.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.raw = RawFiles(self.directory)
        self.quantization = quantization_of(self.directory)
        self._views = logical_views(self.raw.tensors, self.quantization, self.directory)
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType({n: v.tensor for n, v in self._views.items()})

    def __enter__(self) -> SafetensorsDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.raw.close()

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raise UserError unless tensor `name` exists and has the expected shape."""
        stored = self._stored(name)
        if stored.shape != expected:
            raise UserError(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, the model needs {list(expected)}"
            )

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or the rectangle of it that `slices` names; nothing outside of it is read from the file.

        Of quantised weights, whole blocks of scales. The result may be a strided view. Raises UserError if there is no
        such tensor, its file cannot be read, or a dequantised value is not finite.
        """
        self._stored(name)
        return self._views[name].read(self.raw, slices)

    def _stored(self, name: str) -> StoredTensor:
        stored = self.tensors.get(name)
        if stored is None:
            raise UserError(f"{self.directory}: tensor {name} is not in the checkpoint")
        return stored
