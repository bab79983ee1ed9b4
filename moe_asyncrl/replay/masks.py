"""Sampling masks of packed positions: which token ids the sampler chose from, in CSR form.

Position i predicts the token behind it, so the ids at position i are those that truncation kept when token i + 1 was
sampled. A position is *truncated* if it has such ids at all; elsewhere the whole vocabulary was kept.

    masks of trajectories ─▶ packed ─▶ at(positions of a context-parallel rank) ─▶ within(vocabulary of a rank)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_asyncrl.data.trajectory import SamplingMask


@dataclass(frozen=True)
class Support:
    """Kept ids at n positions, those of one rank's part of the vocabulary. Ids are global, rising at each position."""

    counts: Tensor
    """int64 [n], ids at each position; 0 also where all kept ids are in other parts of the vocabulary."""
    ids: Tensor
    """int32 [sum of counts]"""
    truncated: Tensor
    """bool [n], the same on all tensor-parallel ranks."""

    def at(self, positions: Tensor) -> Support:
        """Those of `positions`, int64 [m], in that order; a position may come more than once, or never."""
        counts = self.counts[positions]
        first = (self.counts.cumsum(0) - self.counts)[positions]
        # The j-th kept id of a position stands j places behind the position's first.
        within = torch.arange(int(counts.sum()), device=counts.device)
        within = within + torch.repeat_interleave(first - (counts.cumsum(0) - counts), counts)
        return Support(counts, self.ids[within], self.truncated[positions])

    def within(self, vocabulary: range) -> Support:
        """Only the ids in `vocabulary`, which counts up by 1."""
        kept = (self.ids >= vocabulary.start) & (self.ids < vocabulary.stop)
        rows = torch.repeat_interleave(torch.arange(len(self.counts), device=kept.device), self.counts)
        return Support(torch.bincount(rows[kept], minlength=len(self.counts)), self.ids[kept], self.truncated)

    def to(self, device: torch.device) -> Support:
        """The same on `device`."""
        counts, ids, truncated = (t.to(device, non_blocking=True) for t in (self.counts, self.ids, self.truncated))
        return Support(counts, ids, truncated)


def packed(masks: Sequence[SamplingMask | None], lengths: Sequence[int], total: int) -> Support:
    """Masks of samples of T tokens laid end to end, T - 1 positions each (`lengths`), and padding up to `total`.

    A sample without a mask, and padding, are not truncated.
    """
    counts = np.zeros(total, dtype=np.int64)
    ids = []
    at = 0
    for mask, length in zip(masks, lengths, strict=True):
        if mask is not None:
            counts[at : at + length] = np.diff(mask.indptr)[1:]
            ids.append(mask.ids[mask.indptr[1] :])
        at += length
    flat = np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, dtype=np.int32)
    there = torch.from_numpy(counts)
    return Support(there, torch.from_numpy(flat), there > 0)
