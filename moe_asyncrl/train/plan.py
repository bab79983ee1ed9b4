"""From the headers of a batch to what each rank trains on. Pure: every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from moe_asyncrl.algorithms.advantages import group_advantages
from moe_asyncrl.algorithms.aggregation import token_weights
from moe_asyncrl.config.recipe import Algorithm
from moe_asyncrl.data.messages import HeldGroup
from moe_asyncrl.data.wire import TrajectoryHeader, check_header
from moe_asyncrl.models.counts import active_parameters
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.pack import Packing, pack
from moe_asyncrl.train.rank_positions import whole_length

OtherVersion = Literal["use", "mask", "drop"]
REWARD = "total"
"""The reward that training uses."""


@dataclass(frozen=True)
class UpdatePlan:
    """One optimizer update: its trajectories, how they count, and where they go."""

    headers: tuple[TrajectoryHeader, ...]
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    """Of each trained token of each trajectory; over the whole update they sum to 1."""
    packing: Packing

    def of_rank(self, dp_rank: int) -> list[int]:
        """Numbers of the trajectories that one data-parallel rank needs, in the order of its micro-batches."""
        return [i for micro_batch in self.packing.ranks[dp_rank] for i in micro_batch]


@dataclass(frozen=True)
class BatchPlan:
    """What is done with one batch."""

    updates: tuple[UpdatePlan, ...]
    reward_mean: float | None
    """Over all scored trajectories of the batch; None without one."""
    reward_std: float | None
    uniform_groups: int
    """Groups without any difference in reward: nothing is learnt from them (but by a KL in the reward)."""
    unscored: int
    """Trajectories left out because their score failed."""
    dropped: int = 0
    """Trajectories left out because some of their routing rows are of other weights."""


def crossover_length(spec: ModelSpec) -> int:
    """Length at which the quadratic part of attention costs as much as all matrices.

    Forward multiply-adds of one token: its active parameters; of attention over n/2 earlier tokens on average, scores
    and values: n * heads * head_dim a layer.
    """
    quadratic = spec.num_layers * spec.num_attention_heads * spec.head_dim
    return max(1, active_parameters(spec) // quadratic)


def plan_batch(
    groups: Sequence[HeldGroup],
    algorithm: Algorithm,
    layout: Layout,
    *,
    micro_batch_tokens: int,
    crossover: int | None = None,
    other_version: OtherVersion = "use",
) -> BatchPlan:
    """Advantages over whole groups, then updates of whole groups, then a packing for each.

    Trajectories without a score or without a sampled token are left out. `other_version`: what is done with routing
    rows of other weights than their token's: `mask` leaves those tokens out of the loss, `drop` the whole trajectory
    out of the update (its reward still counts in its group's advantages).

    Raises:
        ContractViolation: a header of another schema.
    """
    headers = [h for g in groups for h in g.headers]
    for h in headers:
        check_header(h)
    member = [i for i, g in enumerate(groups) for _ in g.headers]
    known = torch.tensor([h.rewards[REWARD] for h in headers if REWARD in h.rewards], dtype=torch.float64)
    advantages = list(advantages_of(groups, algorithm).values())
    learnt_from = {m for a, m in zip(advantages, member, strict=True) if a}

    drop = other_version == "drop"
    tokens = [h.sampled - (h.other_version_sampled if other_version == "mask" else 0) for h in headers]
    updates = []
    for part in split_evenly(len(groups), algorithm.updates_per_batch):
        chosen = [
            i
            for i, (h, m) in enumerate(zip(headers, member, strict=True))
            if m in part and REWARD in h.rewards and tokens[i] > 0 and h.length > 1
            if not (drop and h.other_version_rows)
        ]
        counts = torch.tensor([tokens[i] for i in chosen], dtype=torch.int64)
        updates.append(
            UpdatePlan(
                headers=tuple(headers[i] for i in chosen),
                advantages=tuple(advantages[i] for i in chosen),
                weights=tuple(token_weights(counts, algorithm.aggregation).tolist()),
                packing=packing_for(
                    [headers[i].length - 1 for i in chosen],
                    layout,
                    micro_batch_tokens=micro_batch_tokens,
                    crossover=crossover,
                ),
            )
        )
    return BatchPlan(
        updates=tuple(updates),
        reward_mean=float(known.mean()) if known.numel() else None,
        reward_std=float(known.std(correction=0)) if known.numel() else None,
        uniform_groups=len(groups) - len(learnt_from),
        unscored=len(headers) - known.numel(),
        dropped=sum(drop and h.other_version_rows > 0 for h in headers),
    )


def advantages_of(
    groups: Sequence[HeldGroup], algorithm: Algorithm, penalties: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Advantage of each trajectory of the batch by name, in the groups' order.

    `penalties` are taken off the rewards first, by name; a trajectory without one loses nothing.
    """
    headers = [h for g in groups for h in g.headers]
    names = [h.identity.trajectory for h in headers]
    member = torch.tensor([i for i, g in enumerate(groups) for _ in g.headers], dtype=torch.int64)
    scored = torch.tensor([REWARD in h.rewards for h in headers], dtype=torch.bool)
    off = penalties or {}
    rewards = torch.tensor(
        [h.rewards.get(REWARD, 0.0) - off.get(n, 0.0) for n, h in zip(names, headers, strict=True)],
        dtype=torch.float64,
    )
    found = group_advantages(rewards, member, scored, normalize_std=algorithm.normalize_std)
    return dict(zip(names, found.tolist(), strict=True))


def packing_for(
    lengths: Sequence[int], layout: Layout, *, micro_batch_tokens: int, crossover: int | None = None
) -> Packing:
    """Micro-batches of sequences of `lengths` input tokens, at most `micro_batch_tokens` of them on one rank.

    A rank holds 1 / cp of each sequence, so a micro-batch is cp times as long. See `pack` for the rest.
    """
    return pack(
        [whole_length(n, layout) for n in lengths],
        dp=layout.dp,
        micro_batch_tokens=micro_batch_tokens * layout.cp,
        crossover=crossover,
        multiple=micro_batch_multiple(layout),
    )


def micro_batch_multiple(layout: Layout) -> int:
    """The number of micro-batches is a multiple of it: interleaved stages pass them on in rounds of `pp`."""
    return layout.pp if layout.chunks > 1 else 1


def split_evenly(n: int, parts: int) -> list[range]:
    """[0, n) as at most `parts` contiguous ranges that differ by at most 1 in size; none is empty unless n is 0."""
    parts = max(1, min(n, parts))
    bounds = [n * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
