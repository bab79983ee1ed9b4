"""RMSNorm of queries or keys over all heads together, each tensor-parallel rank with its own heads."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch.distributed.nn.functional import all_reduce


class NormOverHeads(torch.nn.Module):
    """y = w * x / sqrt(mean(x²) + eps), the mean over all heads of all tensor-parallel ranks (MiniMax-M2).

    Stands where Megatron-Core puts a norm over one head. The weight is sharded with the heads.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float, *, of: str) -> None:
        """`of`: `query` or `key`; `hidden_size`: elements of one head."""
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        heads = config.num_attention_heads if of == "query" else config.num_query_groups
        self.width, self.eps = heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads of this rank, head size] to the same."""
        exact = x.float()
        squares = exact.square().sum((-2, -1), keepdim=True)
        if self.group.size() > 1:
            # Differentiable: each rank's output depends on all ranks' squares.
            squares = all_reduce(squares, group=self.group)  # type: ignore[no-untyped-call]
        scaled = (exact * torch.rsqrt(squares / self.width + self.eps)).to(x.dtype)
        return self.weight.view(x.shape[-2:]) * scaled

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron-Core's checkpoints: the weight is one tensor over the tensor-parallel ranks."""
        return sharded_along_heads(self, "weight", prefix, sharded_offsets, metadata)


def sharded_along_heads(
    module: torch.nn.Module,
    name: str,
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """The sharded state of a module whose one parameter `name` is cut along axis 0, head by head."""
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(keep_vars=True),
        prefix,
        {name: 0},
        sharded_offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
