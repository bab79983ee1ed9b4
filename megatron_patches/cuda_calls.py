"""Fault: Megatron-Core calls CUDA without asking whether there is a device.

Seen in Megatron-Core 0.16.1. Buffers are made on `torch.cuda.current_device()`, tensors are moved with `.cuda()`,
streams and events are used everywhere.
Effect: errors on import, on building a model and in every step of a machine without CUDA.
Mending: each Megatron-Core module sees a stand-in for `torch` whose CUDA calls work on the CPU. Two tensor methods,
`cuda` and `record_stream`, cannot be reached that way and become no-ops in the whole process, where they could only
have raised.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch, on_cpu


def _stay(tensor: Any, *args: object, **kwargs: object) -> Any:
    return tensor


def _nothing(tensor: Any, *args: object, **kwargs: object) -> None: ...


def _mend(module: ModuleType) -> None:
    import torch

    from megatron_patches.torch_proxy import torch_on_cpu

    torch.Tensor.cuda = _stay  # type: ignore[method-assign, assignment]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign, assignment]
    if getattr(module, "torch", None) is torch:
        module.torch = torch_on_cpu()  # type: ignore[attr-defined]


PATCH = Patch(
    name="cuda_calls",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.*",),
    applies=on_cpu,
    after=_mend,
)
