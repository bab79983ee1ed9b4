"""Kept ids by position, and log-probabilities inside them, against dense float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.replay.masks import Support, packed
from moe_asyncrl.train.batch import Sample, make_micro_batch
from moe_asyncrl.train.support import support_logprobs

VOCABULARY = 23


def lists_of(support: Support) -> list[list[int]]:
    return [part.tolist() for part in torch.split(support.ids, support.counts.tolist())]


def support_from(rows: list[list[int]]) -> Support:
    counts = torch.tensor([len(r) for r in rows], dtype=torch.int64)
    return Support(counts, torch.tensor([i for r in rows for i in r], dtype=torch.int32), counts > 0)


rows_of_ids = st.lists(st.sets(st.integers(0, VOCABULARY - 1), max_size=6).map(sorted), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40)
@given(rows=rows_of_ids, data=st.data())
def test_positions_and_parts_of_the_vocabulary_are_those_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    """As of context parallelism (positions in another order) and tensor parallelism (parts of the vocabulary)."""
    support = support_from(rows)
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=15))
    cut = data.draw(st.integers(0, VOCABULARY))
    chosen = support.at(torch.tensor(positions, dtype=torch.int64))
    assert lists_of(chosen) == [rows[p] for p in positions]
    for part in (range(cut), range(cut, VOCABULARY)):
        mine = chosen.within(part)
        assert lists_of(mine) == [[i for i in rows[p] if i in part] for p in positions]
        assert mine.truncated.tolist() == [bool(rows[p]) for p in positions]


def test_masks_stand_at_the_position_that_predicts_their_token() -> None:
    """Token t of a sample is predicted at position t - 1; padding and samples without a mask keep everything."""
    mask = SamplingMask(np.array([0, 0, 2, 2, 3], np.int64), np.array([3, 5, 9], np.int32))
    assert lists_of(packed([mask, None, mask], [3, 2, 3], 10)) == [[3, 5], [], [9], [], [], [3, 5], [], [9], [], []]


def test_a_micro_batch_holds_this_ranks_part_of_the_vocabulary() -> None:
    mask = SamplingMask(np.array([0, 0, 2, 2, 3], np.int64), np.array([3, 5, 9], np.int32))
    sample = Sample(name="s", tokens=np.array([1, 5, 2, 9], np.int32), trained=np.array([False, True, False, True]))
    masked = Sample(name="m", tokens=sample.tokens, trained=sample.trained, mask=mask)
    made = make_micro_batch([sample, masked], multiple=4, vocabulary=range(4, 8)).support
    assert made is not None and lists_of(made) == [[], [], [], [5], [], [], [], []]
    assert made.truncated.tolist() == [False, False, False, True, False, True, False, False]
    assert make_micro_batch([sample], vocabulary=range(8)).support is None
    assert make_micro_batch([masked]).support is None, "no logits come out here"


def dense(logits: torch.Tensor, labels: torch.Tensor, rows: list[list[int]], temperature: float) -> torch.Tensor:
    """The same by a dense mask, in float64."""
    outside = torch.ones(logits.shape, dtype=torch.bool)
    for i, kept in enumerate(rows):
        outside[i, kept] = False
    inside = (logits.double() / temperature).masked_fill(outside, -torch.inf)
    truncated = torch.tensor([bool(r) for r in rows])
    found = torch.log_softmax(inside, -1).gather(1, labels[:, None])[:, 0]
    return torch.where(truncated, found, 0.0)


@settings(deadline=None, max_examples=40)
@given(rows=rows_of_ids, seed=st.integers(0, 2**31), temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]))
def test_values_and_gradients_equal_a_dense_mask(rows: list[list[int]], seed: int, temperature: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(len(rows), VOCABULARY, generator=draw)
    labels = torch.tensor([kept[int(torch.randint(len(kept), (), generator=draw))] if kept else 0 for kept in rows])
    weights = torch.randn(len(rows), generator=draw)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = support_logprobs(ours, labels, support_from(rows), temperature=temperature)
    expected = dense(exact, labels, rows, temperature)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    kept = torch.tensor([bool(r) for r in rows])
    (expected[kept] * weights[kept]).sum().backward()  # type: ignore[no-untyped-call]
    assert found.dtype == torch.float32 and ours.grad is not None and exact.grad is not None
    assert float((found.detach() - expected.detach()).abs().max()) <= 1e-5
    reference = torch.where(kept[:, None], exact.grad, 0.0)
    assert float((ours.grad - reference).abs().max()) <= 1e-5 * max(1.0, float(reference.abs().max()))


def test_finite_differences_agree() -> None:
    rows = [[0, 3, 4, 22], [], [7], [1, 2, 3, 4, 5, 6, 7]]
    labels = torch.tensor([4, 0, 7, 1])
    logits = torch.randn(
        4, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: support_logprobs(x, labels, support_from(rows), temperature=0.7), (logits,)
    )


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_logits_of_any_size_stay_finite(large: float) -> None:
    logits = torch.full((1, VOCABULARY), large).requires_grad_()
    found = support_logprobs(logits, torch.tensor([3]), support_from([[1, 3]]), temperature=0.1)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert (
        abs(float(found.detach()) + np.log(2)) < 1e-6 and logits.grad is not None and bool(logits.grad.isfinite().all())
    )
