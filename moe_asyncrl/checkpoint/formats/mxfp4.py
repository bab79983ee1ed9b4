"""MXFP4 as gpt-oss publishes its experts: 4-bit floats, two a byte, 32 with one power of two as scale. Read only.

Stored are `<name>_blocks`, uint8 [experts, rows, groups, 16], and `<name>_scales`, uint8 [experts, rows, groups]; the
weight is [experts, 32 * groups, rows]: the groups run along the input. Formats: OCP Microscaling Formats 1.0, E2M1
values and E8M0 scales; the low half of a byte comes first. Equal to `convert_moe_packed_tensors` of transformers.
"""

from __future__ import annotations

import torch

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
GROUP = 32
"""Values that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def logical_shape(blocks: tuple[int, ...]) -> tuple[int, int, int]:
    """[experts, inputs, rows] of blocks [experts, rows, groups, 16]."""
    experts, rows, groups, _ = blocks
    return experts, groups * GROUP, rows


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [experts, rows, inputs] of blocks uint8 [experts, rows, groups, 16] and scales uint8 [..., groups].

    Exact but for scale 255, which means NaN, and values beyond bfloat16.
    """
    pairs = _pairs()[blocks.int()].flatten(-2)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127).bfloat16()
    return pairs.mul_(powers[scales.int()][..., None]).flatten(-2)


def _pairs() -> torch.Tensor:
    """[256, 2]: the two values of each byte."""
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
