"""Token weights sum to 1, so that no cut of a batch can change its loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.algorithms.aggregation import Aggregation, token_weights
from moe_asyncrl.train.pack import pack

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=40)
KINDS = st.sampled_from(["token_mean", "sequence_mean"])


@settings(max_examples=200, deadline=None)
@given(counts=COUNTS, kind=KINDS, dp=st.integers(1, 4), limit=st.integers(1, 60), seed=st.integers(0, 99))
def test_any_cut_gives_the_mean(counts: list[int], kind: Aggregation, dp: int, limit: int, seed: int) -> None:
    weights = token_weights(torch.tensor(counts), kind)
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(n, dtype=torch.float64, generator=generator) for n in counts]
    filled = [x for x in losses if len(x)]
    if not filled:
        assert (weights == 0).all()
        return
    mean = torch.cat(filled).mean() if kind == "token_mean" else torch.stack([x.mean() for x in filled]).mean()
    packing = pack([n + 1 for n in counts], dp=dp, micro_batch_tokens=limit)
    parts = [sum((losses[i] * weights[i]).sum() for i in mb) for rank in packing.ranks for mb in rank if mb]
    assert float(sum(parts)) == pytest.approx(float(mean), abs=1e-12)
    assert float((torch.tensor(counts) * weights).sum()) == pytest.approx(1.0, abs=1e-12)
