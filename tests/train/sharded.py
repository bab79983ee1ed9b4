"""Whole tensors of a spread model, without files: filled from their names, and put together from all ranks' parts.

Megatron-Core's sharded state dict says of each local tensor which slice of which global tensor it is. That is enough to
give every layout the same weights, and to compare gradients between layouts, without any parameter map of ours.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Part:
    """One rank's slice of a global tensor."""

    name: str
    global_shape: tuple[int, ...]
    where: tuple[slice | int, ...]
    """Index of the slice in the global tensor; an int where a layer or expert axis was added."""
    value: torch.Tensor


def parts_of(chunk: Any) -> Iterator[Part]:
    """The slices of a model chunk's parameters. Their values are views: writing to them writes to the model."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    pending = list(nested_values(chunk.sharded_state_dict(metadata=metadata)))
    while pending:
        entry = pending.pop(0)
        if isinstance(entry, ShardedTensorFactory):
            pending = list(nested_values(entry.build())) + pending
        elif isinstance(entry, ShardedTensor) and entry.data is not None:
            lead = entry.prepend_axis_num
            where: tuple[slice | int, ...] = tuple(entry.global_offset[:lead])
            for start, size in zip(entry.global_offset[lead:], entry.data.shape, strict=True):
                where += (slice(start, start + size),)
            yield Part(entry.key, tuple(entry.global_shape), where, entry.data)


def named_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Float32 values that depend on the name and shape only, so sized that logits spread by more than 1.

    Norm weights stay near 1; matrices keep the scale of what they multiply; experts differ since each is drawn anew.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if "word_embeddings" in name:
        return noise
    scale = 2.0 if "output_layer" in name or "router" in name else 1.0
    return noise * float(scale / shape[-1] ** 0.5)


def fill(chunks: list[Any], *, vocab_size: int, swap_experts: bool = False, transpose_projection: bool = False) -> None:
    """Give every parameter its values by name; rows that pad the vocabulary are 0.

    The two switches plant an error: `swap_experts` exchanges the first two experts' second matrices in every MoE
    layer, `transpose_projection` transposes the attention's output projection, a square matrix, in every layer.
    """
    with torch.no_grad():
        for chunk in chunks:
            for part in parts_of(chunk):
                shape = part.global_shape
                if over_vocabulary(part.name):
                    whole = torch.zeros(shape)
                    whole[:vocab_size] = named_tensor(part.name, (vocab_size, *shape[1:]))
                else:
                    whole = named_tensor(part.name, shape)
                if swap_experts and ".experts.linear_fc2" in part.name:
                    expert_axis = whole.dim() - 3
                    order = torch.arange(whole.shape[expert_axis])
                    whole = whole.index_select(expert_axis, torch.cat([order[:2].flip(0), order[2:]]))
                if transpose_projection and "linear_proj.weight" in part.name:
                    whole = whole.mT
                part.value.copy_(whole[part.where])


def over_vocabulary(name: str) -> bool:
    """Whether a tensor's first dimension is the vocabulary."""
    return "word_embeddings" in name or "output_layer" in name


def gradients(ddp_chunks: list[Any]) -> list[Part]:
    """This rank's slices of all gradients, out of the buffers of Megatron-Core's DistributedDataParallel."""
    found = []
    with torch.no_grad():
        for wrapped in ddp_chunks:
            weights = [parameter.detach().clone() for parameter in wrapped.module.parameters()]
            for parameter in wrapped.module.parameters():
                parameter.copy_(parameter.main_grad)
            found += [Part(p.name, p.global_shape, p.where, p.value.clone()) for p in parts_of(wrapped.module)]
            for parameter, weight in zip(wrapped.module.parameters(), weights, strict=True):
                parameter.copy_(weight)
    return found


def assemble(parts: list[list[Part]], tolerance: float = 1e-6) -> dict[str, torch.Tensor]:
    """Global tensors by name from all ranks' parts. Asserts that copies agree and that nothing is missing."""
    wholes: dict[str, torch.Tensor] = {}
    for part in (part for rank in parts for part in rank):
        whole = wholes.setdefault(part.name, torch.full(part.global_shape, float("nan")))
        there = whole[part.where]
        if not there.isnan().any():
            assert relative(part.value, there) < tolerance, f"copies of {part.name} differ"
        whole[part.where] = part.value
    for name, whole in wholes.items():
        assert not whole.isnan().any(), f"{name} is not covered by the ranks' parts"
    return wholes


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b|."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
