"""From a model's tensors to what is stored of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from moe_asyncrl.checkpoint.formats import fp8
from moe_asyncrl.checkpoint.formats.scales import Scales
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor


class Encoder(Protocol):
    """A form that a checkpoint is written in."""

    def stored_tensors(self, tensors: Iterable[HfTensor]) -> list[HfTensor]:
        """Names, shapes and types of what `encode` will give for these tensors, in their order."""
        ...

    def encode(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored of one whole tensor, by name."""
        ...

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The `config.json` of such a checkpoint."""
        ...


class Plain:
    """Every tensor as it is, with no `quantization_config`."""

    def stored_tensors(self, tensors: Iterable[HfTensor]) -> list[HfTensor]:
        """See Encoder."""
        return list(tensors)

    def encode(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """See Encoder."""
        return {name: value}

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """See Encoder."""
        return {key: value for key, value in config.items() if key != "quantization_config"}


class Fp8:
    """The weights that were published in FP8 in FP8, all others as they are.

    A block of which every value is what its published scale and some codes give has not changed: it gets that scale and
    those codes, which are the published ones. All other blocks are quantised anew, with amax / 448 as their scale.
    """

    def __init__(self, published: Scales) -> None:
        self._published = published

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self._published.quantization.block[0]

    def stored_tensors(self, tensors: Iterable[HfTensor]) -> list[HfTensor]:
        """See Encoder. Raises UserError if a weight has another shape than the published one."""
        found: list[HfTensor] = []
        for tensor in tensors:
            shape = self._published.weights.get(tensor.name)
            if shape is None:
                found.append(tensor)
                continue
            if shape != tensor.shape:
                raise UserError(f"{tensor.name} has shape {list(tensor.shape)}, the published FP8 weight {list(shape)}")
            dtype = str(self._published.dtype(tensor.name)).removeprefix("torch.")
            grid = fp8.grid(shape, self._published.quantization.block)
            found += [replace(tensor, dtype="float8_e4m3fn"), HfTensor(tensor.name + fp8.SCALE_SUFFIX, grid, dtype)]
        return found

    def encode(self, name: str, value: torch.Tensor, first: int = 0) -> dict[str, torch.Tensor]:
        """See Encoder. `value` may be a part of the first axis, from row `first`, where a block begins.

        Raises UserError, naming the place, for a value that is not finite.
        """
        if name not in self._published.weights:
            return {name: value}
        at = fp8.not_finite(value)
        if at is not None:
            raise UserError(f"{name} is {float(value[at])} at {[first + at[0], *at[1:]]}, which FP8 cannot hold")
        form = self._published.quantization
        begin, count = first // fp8.rows_a_scale(value.ndim, form.block), fp8.grid(tuple(value.shape), form.block)[0]
        scales = self._published.read(name)[begin : begin + count]
        found = fp8.quantize(value, form.block, scales, power_of_two=form.power_of_two)
        for (row, *more), codes in self._published.kept(name):
            if not begin <= row < begin + count:
                continue
            place = (row - begin, *more)
            area = fp8.area(place, tuple(value.shape), form.block)
            meant = fp8.dequantize(codes, scales[place][None, None], form.block).float()
            if torch.equal(meant.view(torch.int32), value[area].float().reshape(meant.shape).view(torch.int32)):
                found.codes.view(torch.uint8)[area] = codes.view(torch.uint8)
                found.scales[place] = scales[place]
        return {name: found.codes, name + fp8.SCALE_SUFFIX: found.scales}

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """See Encoder."""
        return config | {"quantization_config": dict(self._published.quantization.stated)}
