"""Fault: what routers count of their tokens does not get along with a padding mask.

Seen in Megatron-Core 0.16.1.

- `moe.router.TopKRouter._apply_expert_bias` combines a map [tokens, experts] with a mask [tokens]: an error, or, where
  both sizes are equal, the wrong experts left out without one.
- `moe.moe_utils.get_tokens_per_expert_and_token_count` sums over ranks in place and then reads the sums as this rank's
  own; a micro-batch of padding alone divides by its number of tokens, 0.

Effect: with a mask, models with an expert bias do not run, and a balance loss may be no number.
Mending: the mask is a column, and tokens are counted once. The balance loss of a micro-batch is scaled by all of its
tokens that are no padding, on whichever tensor- and context-parallel ranks they stand, and is 0 without any.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch

ROUTER = "megatron.core.transformer.moe.router"
UTILS = "megatron.core.transformer.moe.moe_utils"


def _mend(module: ModuleType) -> None:
    if module.__name__ == UTILS:
        _mend_counts(module)
        return
    apply_bias = module.TopKRouter._apply_expert_bias

    def as_column(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        apply_bias(self, routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

    module.TopKRouter._apply_expert_bias = as_column


def _mend_counts(module: ModuleType) -> None:
    count = module.get_tokens_per_expert_and_token_count

    def counted(routing_map: Any, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False) -> Any:
        if not with_padding_mask:
            return count(routing_map, reduce_group, topk=topk, with_padding_mask=False)
        of_experts = module.reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), reduce_group)
        tokens = of_experts.sum() / topk
        return of_experts, tokens, tokens.clamp(min=1)

    module.get_tokens_per_expert_and_token_count = counted  # type: ignore[attr-defined]


PATCH = Patch(
    name="router_padding",
    seen_in="megatron-core 0.16.1",
    modules=(UTILS, ROUTER),
    applies=lambda _capabilities: True,
    after=_mend,
)
