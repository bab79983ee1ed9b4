"""The published scales of FP8 weights, with which weights that did not change get back their published bytes.

They are read from the checkpoint itself (`CheckpointScales`), or from a copy that stands beside weights which are no
longer FP8 (`collect` writes it, `ScaleFolder` reads it). The copy is a folder with

- `fp8.json`: `quantization_config` as published, and `weights`, the shape of every FP8 weight by name;
- `scales.safetensors`: for each weight `<name>_scale_inv` as published. Where a scale is so small or large that
  bfloat16 does not tell its codes apart, also `<name>_kept_blocks`, int64 [n, axes] with the places of such blocks in
  the grid of scales, and `<name>_kept_codes`, e4m3 [n, rows, columns of a block] with zeros behind the edge.

For 671 billion weights in blocks of 128x128 that is 164 MB.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from moe_asyncrl.checkpoint.formats import fp8
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.quantization import Quantization, read_quantization
from moe_asyncrl.telemetry.run_folder import write_atomic

LIST, SCALES = "fp8.json", "scales.safetensors"
_PLACES, _CODES = "_kept_blocks", "_kept_codes"

Kept = list[tuple[tuple[int, ...], torch.Tensor]]
"""Places in the grid of scales, and the codes of the block there, without what is behind the edge."""


class Scales(Protocol):
    """Which weights are FP8, and how they were scaled."""

    @property
    def quantization(self) -> Quantization:
        """The form."""
        ...

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every FP8 weight by name."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Type of a weight's scales."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The published scales of a weight."""
        ...

    def kept(self, name: str) -> Kept:
        """The blocks whose codes do not follow from values and scale."""
        ...


class CheckpointScales:
    """The scales of an open FP8 checkpoint. Raises UserError if it is another form."""

    def __init__(self, stored: SafetensorsDir) -> None:
        if stored.quantization is None or stored.quantization.method != "fp8":
            raise UserError(f"{stored.directory} is not an FP8 checkpoint, so nothing can be written in its form")
        self._raw = stored.raw
        self.quantization = stored.quantization
        self.weights = {name: t.shape for name, t in stored.tensors.items() if t.form == "fp8"}

    def dtype(self, name: str) -> torch.dtype:
        """See Scales."""
        return self._raw.tensors[name + fp8.SCALE_SUFFIX].dtype

    def read(self, name: str) -> torch.Tensor:
        """See Scales."""
        return self._raw.read(name + fp8.SCALE_SUFFIX)

    def kept(self, name: str) -> Kept:
        """See Scales."""
        found: Kept = []
        size = self.read(name).float().abs()
        low, high = fp8.SAFE_SCALES
        for place in (~((size >= low) & (size <= high))).nonzero().tolist():
            area = fp8.area(tuple(place), self.weights[name], self.quantization.block)
            found.append((tuple(place), self._raw.read(name, area)[(0,) * (len(area) - 2)]))
        return found


class ScaleFolder:
    """What `collect` wrote. Raises UserError if it is not whole."""

    def __init__(self, directory: Path) -> None:
        path = directory / LIST
        try:
            listed = msgspec.json.decode(path.read_bytes(), type=_Listed)
            opened: Any = safe_open(directory / SCALES, framework="pt")
        except (OSError, msgspec.MsgspecError, SafetensorError) as error:
            raise UserError(f"{directory}: not a folder of published scales: {error}") from error
        found = read_quantization(
            {"quantization_config": listed.quantization_config}, lambda m: UserError(f"{path}: {m}")
        )
        if found is None or found.method != "fp8":
            raise UserError(f"{path}: `quantization_config` is not that of FP8 weights")
        self._file = opened
        self._names = frozenset(opened.keys())
        self.quantization = found
        self.weights: Mapping[str, tuple[int, ...]] = listed.weights
        missing = sorted(name for name in self.weights if name + fp8.SCALE_SUFFIX not in self._names)
        if missing:
            raise UserError(f"{directory / SCALES}: the scales of {len(missing)} weights are missing: {missing[0]}, …")

    def dtype(self, name: str) -> torch.dtype:
        """See Scales."""
        return self.read(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """See Scales."""
        value: torch.Tensor = self._file.get_tensor(name + fp8.SCALE_SUFFIX)
        return value

    def kept(self, name: str) -> Kept:
        """See Scales."""
        if name + _PLACES not in self._names:
            return []
        codes = self._file.get_tensor(name + _CODES)
        found: Kept = []
        for number, place in enumerate(self._file.get_tensor(name + _PLACES).tolist()):
            rows, columns = fp8.area(tuple(place), self.weights[name], self.quantization.block)[-2:]
            found.append((tuple(place), codes[number, : rows.stop - rows.start, : columns.stop - columns.start]))
        return found


def open_scales(directory: Path) -> Scales:
    """Those of a folder that `collect` wrote, or of an FP8 checkpoint. Raises UserError if it is neither."""
    return ScaleFolder(directory) if (directory / LIST).is_file() else CheckpointScales(SafetensorsDir(directory))


def collected(stored: SafetensorsDir, wanted: Container[str] | None = None) -> dict[str, bytes]:
    """The files of a folder with the published scales of an FP8 checkpoint, or of its weights that are `wanted`.

    Raises UserError if the checkpoint is not FP8 or damaged.
    """
    scales = CheckpointScales(stored)
    if wanted is not None:
        scales.weights = {name: shape for name, shape in scales.weights.items() if name in wanted}
    listed = _Listed(quantization_config=dict(scales.quantization.stated), weights=scales.weights)
    return {SCALES: save(dict(_tensors(scales))), LIST: msgspec.json.encode(listed)}


def collect(stored: SafetensorsDir, directory: Path) -> None:
    """Write the published scales of an FP8 checkpoint to the folder `directory`; `fp8.json` comes last.

    Raises UserError if the checkpoint is not FP8 or damaged, OSError if the folder cannot be written.
    """
    files = collected(stored)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(directory / name, content)


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    quantization_config: dict[str, Any]
    weights: dict[str, tuple[int, ...]]


def _tensors(scales: Scales) -> Iterator[tuple[str, torch.Tensor]]:
    rows, columns = scales.quantization.block
    for name in scales.weights:
        yield name + fp8.SCALE_SUFFIX, scales.read(name)
        kept = scales.kept(name)
        if kept:
            codes = torch.zeros(len(kept), rows, columns, dtype=fp8.CODES)
            for number, (_, block) in enumerate(kept):
                codes[number, : block.shape[0], : block.shape[1]] = block
            yield name + _PLACES, torch.tensor([place for place, _ in kept], dtype=torch.int64)
            yield name + _CODES, codes
