"""An HF checkpoint whose published FP8 weights are written as FP8 again: what is planned for workers to quantise.

A weight is quantised a band of rows at a time, once for its codes and once for its scales: these may lie in two files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_asyncrl.checkpoint.convert.bands import Band
from moe_asyncrl.checkpoint.convert.contents import FileTable
from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.hf_files import Named, Stored
from moe_asyncrl.checkpoint.convert.program import Encoded
from moe_asyncrl.checkpoint.formats.encode import Fp8
from moe_asyncrl.checkpoint.formats.fp8 import SCALE_SUFFIX, rows_a_scale
from moe_asyncrl.checkpoint.formats.scales import open_scales
from moe_asyncrl.models.algebra import HfTensor


class Fp8Form:
    """`folder` has the published scales: see `formats.scales.open_scales`. Raises UserError if it has not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scales = open_scales(folder)
        self._encoder = Fp8(self._scales)

    def stored_tensors(self, tensor: Stored) -> list[Named]:
        """What is stored of an HF tensor. Raises UserError if it has another shape than the published weight."""
        found = self._encoder.stored_tensors([HfTensor(tensor.name, tensor.shape, tensor.dtype)])
        return [(t.name, t.shape, str(t.dtype)) for t in found]

    def has(self, stored: str) -> bool:
        """Whether a stored tensor is a part of an FP8 weight."""
        return stored.removesuffix(SCALE_SUFFIX) in self._scales.weights

    def bands(self, stored: Stored, tensors: Mapping[str, Stored], limit: int) -> Iterator[Band]:
        """The bands of codes or scales, from values of at most `limit` bytes or one row of blocks."""
        weight = tensors[stored.name.removesuffix(SCALE_SUFFIX)]
        step = rows_a_scale(len(weight.shape), self._scales.quantization.block)
        # Rows of the weight for one of the target.
        ratio = 1 if stored.name == weight.name else step
        each = step * math.prod(weight.shape[1:]) * ITEM_SIZES[weight.dtype]
        step *= max(1, limit // each)
        width = math.prod(stored.shape[1:]) * ITEM_SIZES[stored.dtype]
        assert stored.offset is not None
        for start in range(0, weight.shape[0], step):
            stop = min(weight.shape[0], start + step)
            first, last = start // ratio, -(-stop // ratio)
            yield Band(weight.name, start, stop, stored.offset + first * width, (last - first) * width)

    def encoded(self, stored: Stored, band: Band, dtype: str, table: FileTable) -> Encoded:
        """What a worker makes of the band's values, which are of type `dtype`."""
        return Encoded(table.number(self._folder), band.weight, band.start, dtype, stored.name)
