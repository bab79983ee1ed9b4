"""How the trainer's routers and the sampler's differ, layer by layer, over all ranks.

Every routed token is counted on exactly one rank: data- and expert-parallel ranks route tokens of their own, a
tensor-parallel rank its slice of the packed tokens (sequence parallelism), a pipeline stage its own layers. So the
counts of a layer are the sum over all ranks, with zeros from those that do not have it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.replay.controller import ReplayStats


class RoutingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each MoE layer, as they stand in `routing.jsonl`. Tokens whose row is missing are left out."""

    layers: list[int]
    """Numbers of the layers in the whole model, counted from 0 as HF does."""
    flips: list[float | None]
    """Part of the decisions in which the trainer would have chosen another set of experts; None without a decision."""
    load_sampler: list[list[int]]
    """Tokens of each expert by the sampler's rows."""
    load_trainer: list[list[int]]
    """Tokens of each expert by the trainer's own routers, routing live, for the same tokens."""


def routing_counts(stats: ReplayStats, spec: ModelSpec, device: torch.device) -> RoutingCounts:
    """The counts of a pass in mode `observe`, over all ranks; the same on each. One small collective."""
    e = spec.num_experts
    counts = torch.zeros(spec.num_moe_layers, 2 + 2 * e, dtype=torch.int64)
    for each in stats.layers:
        counts[each.layer, 0] = each.decisions - each.missing
        counts[each.layer, 1] = each.flipped
        if each.given is not None and each.own is not None:
            counts[each.layer, 2 : 2 + e], counts[each.layer, 2 + e :] = each.given, each.own
    counts = counts.to(device)
    dist.all_reduce(counts)
    rows = counts.tolist()
    return RoutingCounts(
        layers=list(spec.moe_layer_indices),
        flips=[row[1] / row[0] if row[0] else None for row in rows],
        load_sampler=[row[2 : 2 + e] for row in rows],
        load_trainer=[row[2 + e :] for row in rows],
    )


def routing_record(step: int, version: int, counts: RoutingCounts) -> dict[str, Any]:
    """The line of `routing.jsonl`."""
    return {"kind": "routing", "step": step, "version": version, **msgspec.structs.asdict(counts)}
