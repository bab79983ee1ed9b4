"""Logits -> log-probabilities of labels at several temperatures, over all tokens or inside a support. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ELEMENTS = 2**24
"""Logits that are looked at together: bounds the extra memory."""


@dataclass(frozen=True)
class Asked:
    """What to compute at m positions."""

    labels: Tensor
    """int64 [m]"""
    temperatures: Tensor
    """float32 [m, J]"""
    kept: Sequence[npt.NDArray[np.int32] | None]
    """m supports as token ids; None for the whole vocabulary."""
    rebuild: Tensor | None = None
    """float32 [m, 3]: top-k (0 for none), top-p and min-p by which to make the support, instead of `kept`."""


def label_logprobs(logits: Tensor, asked: Asked) -> Tensor:
    """Log-probability of each label at each temperature, inside its support.

    Args:
        logits: [m, V], any float type, the whole vocabulary.
        asked: of the same m positions.

    Returns:
        float32 [m, J].
    """
    m, j = asked.temperatures.shape
    out = torch.empty((m, j), dtype=torch.float32, device=logits.device)
    rows = max(1, ELEMENTS // logits.shape[1])
    for at in range(0, m, rows):
        part = slice(at, min(at + rows, m))
        z = logits[part].float()
        label = asked.labels[part, None]
        for i in range(j):
            scaled = z / asked.temperatures[part, i : i + 1]
            outside = _outside(scaled, asked, part)
            if outside is not None:
                outside.scatter_(1, label, False)  # a sampled token was kept, whatever the trainer would have done
                scaled = scaled.masked_fill(outside, float("-inf"))
            out[part, i] = scaled.gather(1, label)[:, 0] - scaled.logsumexp(1)
    return out


def truncated_support(scaled: Tensor, limits: Tensor) -> Tensor:
    """Tokens that top-k, top-p and min-p keep, as SGLang's PyTorch sampler does it: bool [m, V].

    `scaled` float [m, V] are logits over the temperature; `limits` float [m, 3]. Top-p sums up the probabilities of the
    whole vocabulary (not of what top-k left) and keeps a token if those before it have at most `top_p`; min-p is a part
    of the likeliest token's probability.
    """
    probabilities = scaled.softmax(1)
    ordered, ids = probabilities.sort(dim=1, descending=True)
    before = ordered.cumsum(1) - ordered
    v = scaled.shape[1]
    top_k = torch.where(limits[:, :1] > 0, limits[:, :1], float(v))
    keep = torch.arange(v, device=scaled.device)[None] < top_k
    keep &= before <= limits[:, 1:2]
    keep &= ordered >= ordered[:, :1] * limits[:, 2:3]
    return torch.zeros_like(keep).scatter_(1, ids, keep)


def _outside(scaled: Tensor, asked: Asked, part: slice) -> Tensor | None:
    """Tokens outside the support, bool [rows, V]; None if all of them are inside at every position."""
    if asked.rebuild is not None:
        return ~truncated_support(scaled, asked.rebuild[part])
    kept = asked.kept[part]
    if all(ids is None for ids in kept):
        return None
    outside = torch.zeros(scaled.shape, dtype=torch.bool, device=scaled.device)
    for i, ids in enumerate(kept):
        if ids is not None:
            outside[i] = True
            outside[i, torch.from_numpy(ids.astype(np.int64)).to(scaled.device)] = False
    return outside
