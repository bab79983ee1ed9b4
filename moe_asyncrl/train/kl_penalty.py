"""The KL to the reference as a part of the reward: summed over each trajectory, then advantages anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_asyncrl.algorithms.kl import Estimator, kl_estimate
from moe_asyncrl.train.batch import PADDING, MicroBatch
from moe_asyncrl.train.passes import ModelOnRank


def trajectory_kl(
    model: ModelOnRank,
    batches: Sequence[MicroBatch],
    old: Sequence[Tensor | None],
    names: Sequence[str],
    *,
    estimator: Estimator,
) -> dict[str, float]:
    """KL(old policy || reference) of each trajectory by name: the estimates of its trained tokens, summed, in nats.

    Args:
        model: this rank's part.
        batches: this rank's micro-batches, with `reference_logprobs` on the last pipeline stage.
        old: log-probabilities float32 [n] under the weights at the start of the batch, there too.
        names: of all trajectories of the batch, the same on every rank.
        estimator: which one.

    Returns:
        The same on every rank; one small collective.
    """
    place = {name: i for i, name in enumerate(names)}
    sums = torch.zeros(len(place), dtype=torch.float64, device=model.device)
    if model.counts:
        for batch, ours in zip(batches, old, strict=True):
            assert ours is not None and batch.reference_logprobs is not None
            each = kl_estimate(ours.double(), batch.reference_logprobs.double(), estimator)
            each = torch.where(batch.trained, each, 0.0)
            for owner in batch.owners:
                if owner.name != PADDING:
                    sums[place[owner.name]] += each[owner.start : owner.end].sum()
    dist.all_reduce(sums)
    return dict(zip(place, sums.tolist(), strict=True))


def set_advantages(batches: Sequence[MicroBatch], advantages: Mapping[str, float]) -> None:
    """Give every position of a trajectory the advantage under its name."""
    for batch in batches:
        for owner in batch.owners:
            if owner.name != PADDING:
                batch.advantages[owner.start : owner.end] = advantages[owner.name]
