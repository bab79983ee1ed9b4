"""Fault: gathers and reduce-scatters of parts of unequal length use list collectives that gloo refuses.

Seen in Megatron-Core 0.16.1, `tensor_parallel.mappings`; gloo of PyTorch 2.13.
Effect: the token dispatchers raise as soon as two ranks of an expert's tensor-parallel group hold unequal numbers of
tokens.
Mending: the parts are padded to the longest and go through the equal-size collective; the padding is cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch
from moe_asyncrl.config.capability import process_group_backend

Sizes = Sequence[int] | None


def _mend(module: ModuleType) -> None:
    import torch
    import torch.distributed as dist

    gather_even = module._gather_along_first_dim
    reduce_scatter_even = module._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Sizes = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather_even(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        longest, width = max(sizes), input_.shape[1:]
        padded = input_.new_zeros((longest, *width))
        padded[: input_.shape[0]] = input_
        gathered = input_.new_empty((longest * len(sizes), *width))
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([gathered[i * longest : i * longest + size] for i, size in enumerate(sizes)])

    def reduce_scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Sizes = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter_even(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        longest, width = max(sizes), input_.shape[1:]
        padded = input_.new_zeros((longest * len(sizes), *width))
        for i, part in enumerate(torch.split(input_, sizes)):
            padded[i * longest : i * longest + sizes[i]] = part
        own = input_.new_empty((longest, *width))
        dist.reduce_scatter_tensor(own, padded, group=group)
        return own[: sizes[group.rank()]].contiguous()

    module._gather_along_first_dim = gather  # type: ignore[attr-defined]
    module._reduce_scatter_along_first_dim = reduce_scatter  # type: ignore[attr-defined]


PATCH = Patch(
    name="uneven_collectives",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.tensor_parallel.mappings",),
    applies=lambda capabilities: process_group_backend(capabilities) == "gloo",
    after=_mend,
)
