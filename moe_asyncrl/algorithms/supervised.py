"""The supervised loss, token by token."""

from __future__ import annotations

from torch import Tensor


def supervised_loss(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of each target token; the shape of `logprobs`."""
    return -logprobs
