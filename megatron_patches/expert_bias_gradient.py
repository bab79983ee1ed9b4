"""Fault: gradients of experts' output biases are summed over tensor-parallel ranks that hold other experts.

Seen in Megatron-Core 0.16.1, `tensor_parallel.layers.RowParallelLinear`: with sequence parallelism it marks every bias
as seen by a part of the sequence only. An expert sees all of its tokens, and its neighbours are other experts.
Effect: with tensor and expert parallelism, experts with biases (gpt-oss) get gradients of others, without an error.
Mending: the mark is taken off the biases of experts.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch


def _mend(module: ModuleType) -> None:
    build = module.RowParallelLinear.__init__

    @wraps(build)
    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if self.is_expert and self.bias is not None:
            self.bias.sequence_parallel = False

    module.RowParallelLinear.__init__ = unmarked


PATCH = Patch(
    name="expert_bias_gradient",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.tensor_parallel.layers",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
