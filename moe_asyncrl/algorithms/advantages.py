"""How much better a sample is than its siblings: the advantage that every token of it is trained with."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, groups: Tensor, scored: Tensor, *, normalize_std: bool, eps: float = 1e-6
) -> Tensor:
    """Advantages relative to the samples of the same prompt.

    `A_i = r_i - mean(r)`, over the scored samples of the group only; divided by `std(r) + eps` where `normalize_std` is
    set (GRPO, arXiv 2402.03300, section 4.1.2, with the population's standard deviation). A sample that was not scored
    gets 0 and does not move its siblings; so does a sample without a scored sibling, as there is nothing that it could
    be relative to.

    Args:
        rewards: float [N]; read only where `scored`.
        groups: int64 [N], any number that is the same for the samples of one group.
        scored: bool [N], true where the reward is known.
        normalize_std: divide by the group's standard deviation.
        eps: added to the standard deviation, in units of the reward.

    Returns:
        float64 [N]

    Raises:
        ValueError: the shapes differ, or a scored reward is not finite.
    """
    if not rewards.shape == groups.shape == scored.shape or rewards.dim() != 1:
        raise ValueError(f"shapes differ: rewards {rewards.shape}, groups {groups.shape}, scored {scored.shape}")
    r = torch.where(scored, rewards.double(), 0.0)
    if not bool(torch.isfinite(r).all()):
        raise ValueError("a scored reward is not finite")
    if r.numel() == 0:
        return r
    _, member = torch.unique(groups, return_inverse=True)
    slots = int(member.max()) + 1
    weight = scored.double()

    def total(values: Tensor) -> Tensor:
        return torch.zeros(slots, dtype=torch.float64, device=r.device).index_add_(0, member, values)

    def extreme(which: str, neutral: float) -> Tensor:
        start = torch.full((slots,), neutral, dtype=torch.float64, device=r.device)
        return start.scatter_reduce(0, member, torch.where(scored, r, neutral), which)

    count = total(weight)
    mean = total(r) / count.clamp(min=1.0)
    centred = (r - mean[member]) * weight
    centred = torch.where(count[member] > 1, centred, 0.0)
    # Equal rewards must give exactly 0: rounding of the mean divided by a vanishing deviation would not.
    spread = extreme("amax", -torch.inf) - extreme("amin", torch.inf)
    centred = torch.where(spread[member] > 0, centred, 0.0)
    if not normalize_std:
        return centred
    std = (total(centred**2) / count.clamp(min=1.0)).sqrt()
    return centred / (std[member] + eps)
