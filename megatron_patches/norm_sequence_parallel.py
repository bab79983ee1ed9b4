"""Fault: PyTorch's norms are refused under sequence parallelism.

Seen in Megatron-Core 0.16.1, `transformer.torch_norm.WrappedTorchNorm`.
Effect: without Transformer Engine and apex, no MoE model can use tensor parallelism, which needs sequence parallelism.
Mending: the norm is built, and its parameters carry the mark by which `finalize_model_grads` sums their gradients over
the tensor-parallel ranks, each of which sees its own part of the sequence.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch


def _mend(module: ModuleType) -> None:
    wrapped = module.WrappedTorchNorm
    build = wrapped.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        norm = build(cls, _Without(config), *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    wrapped.__new__ = staticmethod(new)


@dataclasses.dataclass(frozen=True)
class _Without:
    """The same configuration, answering that there is no sequence parallelism."""

    config: Any
    sequence_parallel: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


PATCH = Patch(
    name="norm_sequence_parallel",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.transformer.torch_norm",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
