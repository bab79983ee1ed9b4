"""Fault: the bias of an expert's output is added in place to what a function of autograd returned.

Seen in Megatron-Core 0.16.1, `transformer.mlp.MLP.forward`, with the local layers: `RowParallelLinear` returns its
output through an all-reduce over the experts' tensor-parallel ranks, which for one rank hands its input on as a view.
Effect: experts with biases (gpt-oss) run forward without gradients; with them PyTorch raises RuntimeError.
Mending: the linear layer of an expert with a bias returns a copy. Layers without one are left alone.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch


def _mend(module: ModuleType) -> None:
    forward = module.RowParallelLinear.forward

    @wraps(forward)
    def with_own_output(self: Any, input_: Any) -> Any:
        output, bias = forward(self, input_)
        return (output.clone() if bias is not None and self.is_expert else output), bias

    module.RowParallelLinear.forward = with_own_output


PATCH = Patch(
    name="expert_output_bias",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.tensor_parallel.layers",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
