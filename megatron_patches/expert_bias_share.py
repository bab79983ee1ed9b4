"""Fault: where an expert is split over tensor-parallel ranks, each of them adds the whole output bias to its part.

Seen in Megatron-Core 0.16.1, `transformer.mlp.MLP.forward` with `RowParallelLinear`: the parts are summed afterwards.
Effect: experts with biases (gpt-oss) on more than one expert-tensor-parallel rank have their output bias added as often
as there are ranks, without an error.
Mending: each rank adds its share of the value. The gradient stays whole: every rank sees the whole gradient of the
sum, and so the copies of the bias stay equal.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch


def _mend(module: ModuleType) -> None:
    forward = module.RowParallelLinear.forward

    @wraps(forward)
    def with_share(self: Any, input_: Any) -> Any:
        output, bias = forward(self, input_)
        ranks = self.tp_group.size() if bias is not None and self.is_expert else 1
        if ranks > 1:
            whole = bias.detach()
            bias = whole / ranks + (bias - whole)
        return output, bias

    module.RowParallelLinear.forward = with_share


PATCH = Patch(
    name="expert_bias_share",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.tensor_parallel.layers",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
