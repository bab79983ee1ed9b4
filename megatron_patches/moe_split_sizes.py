"""Fault: the token dispatcher's split sizes become lists of numbers only if they started on a CUDA device.

Seen in Megatron-Core 0.16.1, `transformer.moe.moe_utils.maybe_move_tensor_to_cpu`.
Effect: on a CPU they stay tensors, and the all-to-all refuses them.
Mending: a CPU tensor asked for as numpy becomes numpy.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch, on_cpu


def _mend(module: ModuleType) -> None:
    import torch

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu  # type: ignore[attr-defined]


PATCH = Patch(
    name="moe_split_sizes",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.transformer.moe.moe_utils",),
    applies=on_cpu,
    after=_mend,
)
