"""The optimizer's state as sharded tensors of the weights' own shapes, gathered where it is written and nowhere else.

Megatron-Core's distributed optimizer lays a stage's weights end to end in buffers and gives each data-parallel rank an
equal part of each. To save it, Megatron-Core gathers the whole on every rank, over zeros, in five passes over memory.
Only the first rank of the group writes, so here only it receives, and every number is copied once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.weights.agree import collective_device

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Weights in float32, and Adam's moments."""


def sharded_state(part: Any, weights: dict[str, Any], metadata: dict[str, Any]) -> dict[int, Any]:
    """State of one of Megatron-Core's distributed optimizers, to be saved. Collective over its data-parallel group.

    `weights`: the sharded weights of the same rank. Ranks other than the group's first get tensors of the right shape
    whose values mean nothing; they are copies that are not written.
    """
    part.state_dict()  # an optimizer without a step gets its moments here
    part.get_parameter_state_dp_zero = lambda **_: gathered(part)
    try:
        sharded: dict[int, Any] = part.sharded_param_state_fully_reshardable(weights, False, metadata)
    finally:
        del part.get_parameter_state_dp_zero
    return sharded


def gathered(part: Any) -> dict[int, Any]:
    """What the optimizer's `get_parameter_state_dp_zero` answers: buffer -> type -> key -> float32 [numbers in it]."""
    return {
        number: {
            dtype: {key: _whole(part, part.buffers[number], buckets, key) for key in KEYS}
            for dtype, buckets in ranges.items()
        }
        for number, ranges in enumerate(part.gbuf_ranges)
    }


def _whole(part: Any, buffer: Any, buckets: list[Any], key: str) -> torch.Tensor:
    group = part.data_parallel_group
    size = dist.get_world_size(group)
    # What nobody touches takes no memory: on ranks that receive nothing it stays a promise.
    whole = torch.empty(buffer.numel_unpadded, dtype=torch.float32)
    start = 0
    for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
        used = bucket.numel_unpadded
        target = whole[start : start + used]
        if size == 1:
            _fill(part, target, ranges, key)
        else:
            length = bucket.grad_data.numel() // size
            own = torch.empty(length, dtype=torch.float32, device=collective_device(group))
            _fill(part, own, ranges, key)
            pieces = [torch.empty_like(own) for _ in range(size)] if dist.get_rank(group) == 0 else None
            dist.gather(own, pieces, group=group, group_dst=0)
            for place, piece in enumerate(pieces or ()):
                kept = target[place * length : (place + 1) * length]
                kept.copy_(piece[: len(kept)])
        start += used
    return whole


def _fill(part: Any, own: torch.Tensor, ranges: dict[str, Any], key: str) -> None:
    for parameter, places in ranges["param_map"].items():
        value = part._get_main_param_and_optimizer_states(parameter)[key]
        own[places["gbuf_local"].start : places["gbuf_local"].end].copy_(value.detach())
