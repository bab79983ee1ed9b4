"""Entropy of a categorical distribution."""

from __future__ import annotations

from torch import Tensor


def entropy_from_logits(logits: Tensor) -> Tensor:
    """`-sum(p log p)` in nats over the last dimension, which holds the whole vocabulary; float [..., V] -> float [...].

    A logit of -inf is a token that cannot be drawn; it adds nothing.
    """
    logp = logits.log_softmax(dim=-1)
    p = logp.exp()
    return -(p * logp.masked_fill(p == 0, 0.0)).sum(dim=-1)
