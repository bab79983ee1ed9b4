"""Fault: the local layers split the down projections of multi-latent attention over tensor-parallel ranks.

Seen in Megatron-Core 0.16.1, `get_gpt_layer_local_spec`. Transformer Engine's layers keep a full copy on each rank.
Effect: under tensor parallelism the gradients are wrong, by 14 % in one case, without an error.
Mending: a linear layer with the whole weight on each rank takes their place. Under sequence parallelism it sees this
rank's part of the sequence, and its weight carries the mark by which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch

ATTENTION = "megatron.core.transformer.multi_latent_attention"
SPECS = "megatron.core.models.gpt.gpt_layer_specs"


@cache
def replicated_linear() -> Any:
    """The layer's class. Made on the first call, so that importing this file stays free of PyTorch."""
    import torch

    class ReplicatedLinear(torch.nn.Module):
        """y = x W^T, the weight [output_size, input_size] in full on each tensor-parallel rank."""

        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: Any,
            init_method: Callable[[Any], Any],
            bias: bool = False,
            **_: Any,
        ) -> None:
            super().__init__()
            if bias:
                raise ValueError("a down projection of multi-latent attention has no bias")
            self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(self.weight)
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
            """[..., input_size] to [..., output_size], with None for the bias Megatron-Core's callers expect."""
            return torch.nn.functional.linear(hidden, self.weight), None

    return ReplicatedLinear


def _mend(module: ModuleType) -> None:
    if module.__name__ == ATTENTION:
        # The constructor accepts only classes it knows; `Linear` is the one it treats as unsplit.
        module.Linear = replicated_linear()  # type: ignore[attr-defined]
        return
    build = module.get_gpt_layer_local_spec

    @wraps(build)
    def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> Any:
        spec = build(*args, **kwargs)
        attention = spec.submodules.self_attention.submodules
        if hasattr(attention, "linear_kv_down_proj"):
            attention.linear_q_down_proj = attention.linear_kv_down_proj = replicated_linear()
        return spec

    module.get_gpt_layer_local_spec = get_gpt_layer_local_spec  # type: ignore[attr-defined]


PATCH = Patch(
    name="mla_down_projections",
    seen_in="megatron-core 0.16.1",
    modules=(ATTENTION, SPECS),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
