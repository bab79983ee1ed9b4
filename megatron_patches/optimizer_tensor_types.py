"""Fault: the optimizers tell parameter types by names such as `torch.cuda.FloatTensor`.

Seen in Megatron-Core 0.16.1: `optimizer.distrib_optimizer`, `optimizer.optimizer`, `optimizer.clip_grads`.
Effect: TypeError or AssertionError for every parameter that lives on the CPU.
Mending: the same names without `cuda.` are put into the constants of the functions that compare them.
"""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType
from typing import Any

from megatron_patches.patch import Patch, on_cpu

FUNCTIONS = {
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer.__init__",
        "DistributedOptimizer._build_model_and_main_param_groups",
    ),
    "megatron.core.optimizer.optimizer": ("Float16OptimizerWithFloat16Params.__init__",),
    "megatron.core.optimizer.clip_grads": ("clip_grad_by_total_norm_fp32",),
}


def _renamed(constant: Any) -> Any:
    if isinstance(constant, str):
        return constant.replace("torch.cuda.", "torch.") if constant.endswith("Tensor") else constant
    if isinstance(constant, tuple):
        return tuple(_renamed(item) for item in constant)
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_renamed(constant.co_consts))
    return constant


def _mend(module: ModuleType) -> None:
    for path in FUNCTIONS[module.__name__]:
        owner: Any = module
        for part in path.split("."):
            owner = getattr(owner, part)
        function: FunctionType = getattr(owner, "__func__", owner)  # through a classmethod
        function = getattr(function, "__wrapped__", function)  # through a decorator such as torch.no_grad
        function.__code__ = _renamed(function.__code__)


PATCH = Patch(
    name="optimizer_tensor_types",
    seen_in="megatron-core 0.16.1",
    modules=tuple(FUNCTIONS),
    applies=on_cpu,
    after=_mend,
)
