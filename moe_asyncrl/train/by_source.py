"""Rewards of a batch by the source of its prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from moe_asyncrl.data.prompt import SOURCE_NAME
from moe_asyncrl.data.wire import TrajectoryHeader
from moe_asyncrl.train.plan import REWARD


def reward_by_source(headers: Iterable[TrajectoryHeader]) -> dict[str, float]:
    """Mean reward of the scored trajectories of each source, by name; empty where prompts have no named source."""
    found: dict[str, list[float]] = {}
    for h in headers:
        name = h.metadata.get(SOURCE_NAME)
        if name is not None and REWARD in h.rewards:
            found.setdefault(name, []).append(h.rewards[REWARD])
    return {name: sum(rewards) / len(rewards) for name, rewards in sorted(found.items())}
