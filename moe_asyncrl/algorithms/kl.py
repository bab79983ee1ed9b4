"""Estimators of the Kullback-Leibler divergence from samples (J. Schulman, "Approximating KL Divergence", 2020).

All take log-probabilities of tokens that a policy drew, under that policy and under another one, float [...] each, and
estimate KL(drawn || other) token by token, in nats. With `r = pi_other / pi_drawn`, `log r = other - drawn`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(drawn: Tensor, other: Tensor) -> Tensor:
    """`-log r`: unbiased, of either sign, of high variance."""
    return drawn - other


def k2(drawn: Tensor, other: Tensor) -> Tensor:
    """`(log r)^2 / 2`: biased, never negative; its gradient is an unbiased one of the divergence."""
    return (other - drawn).square() / 2


def k3(drawn: Tensor, other: Tensor) -> Tensor:
    """`(r - 1) - log r`: unbiased, never negative, of low variance.

    Computed as `expm1(log r) - log r`, which keeps its digits where the two policies nearly agree.
    """
    log_ratio = other - drawn
    return torch.expm1(log_ratio) - log_ratio


def kl_estimate(drawn: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """The estimate by name; the gradient goes to whichever argument has one.

    As a loss, `k1` has the gradient of `log pi_drawn`, whose mean under the policy is 0: it holds nothing back there.
    Subtracted from a reward, its mean is the divergence.
    """
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](drawn, other)
