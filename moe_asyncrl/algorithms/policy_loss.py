"""The clipped policy loss, token by token, corrected for the difference between sampler and trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token terms, all of the shape of the log-probabilities; only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    """pi_new / pi_old"""
    clipped: Tensor
    """bool: the clipped branch is the smaller one, so that the token has no gradient"""
    importance: Tensor
    """the truncated weight pi_old / pi_sampler; all 1 where the correction is off"""


def importance_weight(old: Tensor, sampler: Tensor, cap: float) -> Tensor:
    """Truncated importance weight `min(pi_old / pi_sampler, cap)`, without gradient; 1 where `cap` is 0.

    It corrects for what separates the sampler from the trainer's old policy: older weights, other kernels, other
    rounding (truncated importance sampling: Ionides 2008; for the mismatch of engines: Yao et al. 2025, "Your Efficient
    RL Framework Secretly Brings You Off-Policy RL Training").
    """
    if cap == 0:
        return torch.ones_like(old)
    return (old - sampler).detach().exp().clamp(max=cap)


def policy_terms(
    new: Tensor,
    old: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> PolicyTerms:
    """`-w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = pi_new / pi_old`.

    The surrogate is PPO's (arXiv 1707.06347, equation 7) with the two bounds apart (DAPO, arXiv 2503.14476, section
    3.1); `w` is `importance_weight`.

    Args:
        new: float [...], log-probabilities under the weights being trained; the gradient goes here.
        old: the same under the weights at the start of the batch; detached by this function.
        sampler: the same as the sampler reported them.
        advantages: the same shape.
        clip_low: the ratio counts as at least `1 - clip_low` where the advantage is negative.
        clip_high: the ratio counts as at most `1 + clip_high` where the advantage is positive.
        importance_cap: cap of the importance weight; 0 turns it off.
    """
    old = old.detach()
    ratio = (new - old).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    weight = importance_weight(old, sampler, importance_cap)
    return PolicyTerms(
        loss=-weight * torch.minimum(plain, bounded),
        ratio=ratio.detach(),
        clipped=(bounded < plain).detach(),
        importance=weight,
    )
