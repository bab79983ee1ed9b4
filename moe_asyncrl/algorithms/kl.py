"""Estimators of the Kullback-Leibler divergence from samples."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(sampler: Tensor, trainer: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler || trainer) from tokens that the sampler drew.

    `k3 = (r - 1) - log r` with `r = pi_trainer / pi_sampler`: unbiased, never negative, of low variance
    (J. Schulman, "Approximating KL Divergence", 2020). Computed as `expm1(log r) - log r`, which keeps its digits
    where the two policies nearly agree.

    Args:
        sampler: float [...], log-probabilities of the drawn tokens under the policy that drew them.
        trainer: the same under the other policy.
    """
    log_ratio = trainer - sampler
    return torch.expm1(log_ratio) - log_ratio
