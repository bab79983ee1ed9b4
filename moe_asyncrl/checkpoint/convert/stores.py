"""Quantised checkpoints that a worker reads or writes: opened once, since the headers of a large one take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_asyncrl.checkpoint.convert.program import Encoded

if TYPE_CHECKING:
    import numpy as np

    from moe_asyncrl.checkpoint.formats.encode import Fp8
    from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir


def raw_type(item: int) -> str:
    """numpy's unsigned type of `item` bytes: values are moved as bits."""
    return f"<u{item}"


class Stores:
    """Of one worker, for all of its units. torch is imported when the first one is asked for."""

    def __init__(self) -> None:
        self._readers: dict[Path, SafetensorsDir] = {}
        self._encoders: dict[Path, Fp8] = {}

    def read(self, directory: Path, name: str, taken: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """A rectangle of a tensor that is stored quantised, as raw items of its dequantised type."""
        import torch

        from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir

        if directory not in self._readers:
            torch.set_num_threads(1)
            self._readers[directory] = SafetensorsDir(directory)
        value = self._readers[directory].read(name, taken)
        signed = {2: torch.int16, 4: torch.int32}[value.element_size()]
        found: np.ndarray[Any, Any] = value.view(signed).numpy()
        return found.view(raw_type(value.element_size()))

    def encode(self, folder: Path, how: Encoded, values: np.ndarray[Any, Any]) -> memoryview:
        """What FP8 stores of rows of a weight. `folder` has the published scales."""
        import torch

        from moe_asyncrl.checkpoint.formats.encode import Fp8
        from moe_asyncrl.checkpoint.formats.scales import open_scales

        if folder not in self._encoders:
            torch.set_num_threads(1)
            self._encoders[folder] = Fp8(open_scales(folder))
        value = torch.from_numpy(values.view(f"<i{values.itemsize}")).view(getattr(torch, how.dtype))
        found = self._encoders[folder].encode(how.weight, value, how.first)[how.stored]
        return found.contiguous().view(torch.uint8).numpy().data.cast("B")
