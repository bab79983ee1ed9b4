"""Moving values between HF tensors and local parameters, block by block. Copies only: no value is ever computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from moe_asyncrl.models.algebra import Block
from moe_asyncrl.models.shards import Shard


def assemble(shard: Shard, read: Callable[[Block], torch.Tensor], out: torch.Tensor) -> None:
    """Fill `out`, the local parameter of `shard`, with `read(block)` for each of its blocks; padding becomes zero.

    `read` returns what lies at `block.hf_slices` of `block.hf`, in any dtype, on any device; it is converted to those
    of `out`.
    Raises ValueError if `out` has another shape.
    """
    if tuple(out.shape) != shard.shape:
        raise ValueError(f"{shard.entry.name} has shape {tuple(out.shape)}, its shard {shard.shape}")
    blocks = shard.blocks
    with torch.no_grad():
        if sum(math.prod(block.size) for block in blocks) < out.numel():
            out.zero_()
        for block in blocks:
            out[block.local_slices].copy_(block.to_local(read(block)))


def disassemble(shard: Shard, local: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
    """The blocks of a local parameter in local order, as views that fit `block.hf_slices` of the HF tensor.

    Raises ValueError if `local` has another shape.
    """
    if tuple(local.shape) != shard.shape:
        raise ValueError(f"{shard.entry.name} has shape {tuple(local.shape)}, its shard {shard.shape}")
    for block in shard.blocks:
        yield block, block.to_hf(local[block.local_slices])
