"""Quantised forms of the tests' own models: from random codes and scales, so that every value is known exactly."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FINITE_CODES = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
"""Of e4m3: all 254 bytes that are numbers."""


def random_codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Every finite code is as likely."""
    return FINITE_CODES[torch.randint(0, 254, shape, generator=generator)].view(torch.float8_e4m3fn)


def random_scales(shape: tuple[int, ...], columns: int, generator: torch.Generator) -> torch.Tensor:
    """Of a size that gives a matrix with so many columns outputs of order one."""
    return (0.5 + torch.rand(shape, generator=generator)) / (150 * math.sqrt(columns))


def blockwise(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What a weight means, one block after the other in float32, rounded to bfloat16 at the end."""
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in scales.shape)).tolist():
        *lead, row, column = index
        at = (*lead, slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
        out[at] = (codes[at].float() * scales[tuple(index)].float()).bfloat16()
    return out


def is_fp8(name: str) -> bool:
    """Which tensors publishers quantise: linear weights, not those of routers, embeddings, heads and `eh_proj`."""
    exempt = ("embed_tokens.", "lm_head.", "mlp.gate.", "block_sparse_moe.gate.", "eh_proj.", "shared_head.", "norm")
    ends = ("weight", ".experts.gate_up_proj", ".experts.down_proj")
    return ("_proj" in name or ".experts." in name) and name.endswith(ends) and not any(e in name for e in exempt)


def fp8_copy(
    source: Path,
    target: Path,
    *,
    block: tuple[int, int] = (16, 16),
    seed: int = 3,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **more: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A bfloat16 checkpoint in one file with random FP8 weights in place of its linear ones, and what they mean.

    `more` stands in its `quantization_config`; `change` alters what is stored.
    """
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, value in sorted(load_file(source / "model.safetensors").items()):
        stored[name] = meant[name] = value
        if is_fp8(name):
            grid = (*value.shape[:-2], *(-(-n // b) for n, b in zip(value.shape[-2:], block, strict=True)))
            scales = random_scales(grid, value.shape[-1], generator)
            stored[name], stored[name + "_scale_inv"] = random_codes(tuple(value.shape), generator), scales
            meant[name] = blockwise(stored[name], scales, block)
    if change is not None:
        change(stored)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    quantise_config(target, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), **more})
    return target, meant


def mxfp4_copy(source: Path, target: Path, *, seed: int = 3) -> tuple[Path, dict[str, torch.Tensor]]:
    """A bfloat16 gpt-oss with random MXFP4 experts, and what they mean to transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, value in sorted(load_file(source / "model.safetensors").items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = value
            continue
        experts, inputs, rows = value.shape
        blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        near = 127 - round(math.log2(3 * math.sqrt(inputs)))
        scales = torch.randint(near - 1, near + 2, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    quantise_config(target, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return target, meant


def quantise_config(directory: Path, quantization: dict[str, Any] | None) -> None:
    """Set or remove `quantization_config`."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    if quantization is None:
        del config["quantization_config"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Shape, type and bytes, so that zeros with a sign count."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return value.contiguous().reshape(-1).view(torch.uint8)
