"""FP8 weights with one scale for each block of rows and columns. Pure functions on tensors.

A weight is `codes * scale`: codes in e4m3, whose largest value is 448, under the weight's name, and scales under
`<name>_scale_inv`. Blocks at the right and lower edge may be smaller. Source: README_WEIGHTS.md and
inference/kernel.py of https://github.com/deepseek-ai/DeepSeek-V3, whose `weight_quant` takes the largest absolute value
of a block / 448 as its scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0
SCALE_SUFFIX = "_scale_inv"
CODES = torch.float8_e4m3fn
SAFE_SCALES = (2.0**-117, 2.0**118)
"""Between these, bfloat16 of `code * scale` tells every code: nothing under- or overflows (smallest code: 2**-9)."""

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised tensor."""

    codes: torch.Tensor
    """e4m3, shape of the weight."""
    scales: torch.Tensor
    """[..., blocks of rows, blocks of columns]."""
    kept: torch.Tensor
    """bool, shape of `scales`: the block has its published scale, and its published codes."""


def grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a weight: leading axes stay (a stack of experts), the last two are cut into blocks."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // block[0]), -(-columns // block[1]))


def not_finite(value: torch.Tensor) -> tuple[int, ...] | None:
    """The first place of a NaN or an infinity."""
    # Smallest and largest value tell it in a tenth of the time that a look at each value takes.
    if not value.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(value))).all()):
        return None
    return tuple((~torch.isfinite(value)).nonzero()[0].tolist())


def rows_a_scale(axes: int, block: Block) -> int:
    """How many entries of a weight's first axis one entry of its scales' first axis stands for."""
    return block[0] if axes == 2 else 1


def area(place: tuple[int, ...], shape: tuple[int, ...], block: Block) -> tuple[slice, ...]:
    """Where the block at `place` of the grid of scales lies in the weight; leading axes as slices of one."""
    *lead, row, column = place
    return (
        *(slice(i, i + 1) for i in lead),
        slice(row * block[0], min(shape[-2], (row + 1) * block[0])),
        slice(column * block[1], min(shape[-1], (column + 1) * block[1])),
    )


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, block: Block, start: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """bfloat16 of float32(code) * scale, for a rectangle of a weight.

    Args:
        codes: e4m3 [..., rows, columns].
        scales: of all blocks that the rectangle touches, [..., blocks of rows, blocks of columns].
        start: row and column of the weight where the rectangle begins.
    """
    rows, columns = codes.shape[-2:]
    skipped = start[0] % block[0]
    wide = scales.float()[..., (torch.arange(columns) + start[1] % block[1]) // block[1]]
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for band in range(scales.shape[-2]):
        at = slice(max(0, band * block[0] - skipped), min(rows, (band + 1) * block[0] - skipped))
        out[..., at, :] = codes[..., at, :].float().mul_(wide[..., band : band + 1, :])
    return out


def quantize(
    value: torch.Tensor, block: Block, published: torch.Tensor | None = None, *, power_of_two: bool = False
) -> Quantized:
    """Quantise a whole weight [..., rows, columns] of finite values.

    A block whose values are all reproduced bit for bit by codes under its `published` scale keeps that scale, and so
    gets back its published codes: it has not changed. Every other block gets the scale amax / 448, where amax is its
    largest absolute value (1 for a block of zeros); with `power_of_two`, the next power of two above. Scales have the
    type of the published ones, else float32.
    """
    shape = grid(tuple(value.shape), block)
    flat = value.reshape(-1, *value.shape[-2:])
    old = None if published is None else published.reshape(-1, *shape[-2:])
    codes = torch.empty(flat.shape, dtype=CODES)
    scales = torch.empty((flat.shape[0], *shape[-2:]), dtype=torch.float32 if old is None else old.dtype)
    kept = torch.zeros(scales.shape, dtype=torch.bool)
    for index in range(flat.shape[0]):
        for band in range(shape[-2]):
            rows = flat[index, band * block[0] : (band + 1) * block[0]]
            found = _quantize_band(rows, block[1], None if old is None else old[index, band], power_of_two)
            codes[index, band * block[0] : (band + 1) * block[0]] = found.codes
            scales[index, band], kept[index, band] = found.scales, found.kept
    return Quantized(codes.view(value.shape), scales.view(shape), kept.view(shape))


def _quantize_band(rows: torch.Tensor, width: int, published: torch.Tensor | None, power_of_two: bool) -> Quantized:
    """One row of blocks: rows [n, columns]."""
    columns = rows.shape[1]
    blocks = -(-columns // width)
    value = torch.nn.functional.pad(rows.float(), (0, blocks * width - columns)).view(-1, blocks, width)
    scales = torch.empty(blocks, dtype=torch.float32 if published is None else published.dtype)
    kept = torch.zeros(blocks, dtype=torch.bool)
    codes = torch.empty(value.shape, dtype=CODES)
    if published is not None:
        codes = _divide(value, published)
        back = (codes.float() * published.float()[:, None]).bfloat16().float()
        kept = (back.view(torch.int32) == value.view(torch.int32)).all(dim=2).all(dim=0)
        scales[kept] = published[kept]
    if not bool(kept.all()):
        scales[~kept] = _fresh(value[:, ~kept], power_of_two).to(scales.dtype)
        codes.view(torch.uint8)[:, ~kept] = _divide(value[:, ~kept], scales[~kept]).view(torch.uint8)
    return Quantized(codes.view(-1, blocks * width)[:, :columns], scales, kept)


def _divide(value: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (value / scales.float()[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(CODES)


def _fresh(value: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    largest = value.abs().amax(dim=(0, 2))
    scales = (largest / E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(largest > 0, scales, 1.0)
