"""How the losses of tokens become the loss of a batch: one weight a token, fixed before the batch is cut.

The weights of all trained tokens of a batch sum to 1, so the loss is `sum(weight * token_loss)` over any micro-batches,
ranks and packing whatever: how the batch is cut cannot change it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def token_weights(counts: Tensor, aggregation: Aggregation) -> Tensor:
    """Weight of each trained token of each sequence.

    `token_mean`: every trained token of the batch counts the same (DAPO, arXiv 2503.14476, section 3.3).
    `sequence_mean`: every sequence counts the same, its tokens share its part (GRPO, arXiv 2402.03300, equation 3).

    Args:
        counts: int64 [N], trained tokens of each sequence of the whole batch; 0 for one that is not trained.
        aggregation: which of the two.

    Returns:
        float64 [N] with `sum(counts * weights) == 1`; all 0 if nothing is trained.
    """
    n = counts.double()
    trained = n > 0
    if not bool(trained.any()):
        return torch.zeros_like(n)
    if aggregation == "token_mean":
        return torch.where(trained, 1.0 / n.sum(), 0.0)
    return torch.where(trained, 1.0 / (trained.sum() * n.clamp(min=1.0)), 0.0)
