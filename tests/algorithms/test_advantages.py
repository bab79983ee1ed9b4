"""Advantages against a plain float64 computation, and the cases that go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.algorithms.advantages import group_advantages


def plain(rewards: list[float], groups: list[int], scored: list[bool], normalize: bool) -> np.ndarray:
    out = np.zeros(len(rewards))
    for g in set(groups):
        members = [i for i in range(len(rewards)) if groups[i] == g and scored[i]]
        if len(members) < 2:
            continue
        r = np.array([rewards[i] for i in members], dtype=np.float64)
        if (r == r[0]).all():
            continue
        a = r - r.mean()
        out[members] = a / (r.std() + 1e-6) if normalize else a
    return out


ROWS = st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(-3, 3), st.booleans()), max_size=40)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, normalize=st.booleans())
def test_equals_the_plain_computation(rows: list[tuple[float, int, bool]], normalize: bool) -> None:
    rewards, groups, scored = ([r[k] for r in rows] for k in range(3))
    # What was not scored has no number; whatever stands there must not matter.
    given_rewards = [r if s else float("nan") for r, s in zip(rewards, scored, strict=True)]
    found = group_advantages(
        torch.tensor(given_rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(scored, dtype=torch.bool),
        normalize_std=normalize,
    )
    np.testing.assert_allclose(found.numpy(), plain(rewards, groups, scored, normalize), rtol=1e-6, atol=1e-9)


def advantages(rewards: list[float], scored: list[bool] | None = None, groups: list[int] | None = None) -> list[float]:
    n = len(rewards)
    return group_advantages(
        torch.tensor(rewards),
        torch.tensor(groups or [0] * n),
        torch.tensor(scored or [True] * n),
        normalize_std=True,
    ).tolist()


def test_equal_rewards_give_exactly_nothing() -> None:
    assert advantages([0.1] * 7) == [0.0] * 7


def test_a_sample_without_a_scored_sibling_gets_nothing() -> None:
    assert advantages([1.0], groups=[5]) == [0.0]
    assert advantages([1.0, 0.0], scored=[True, False]) == [0.0, 0.0]


def test_a_failed_score_is_not_a_reward_of_zero() -> None:
    with_failed = advantages([1.0, 0.0, 0.0], scored=[True, True, False])
    assert with_failed[:2] == pytest.approx([1.0, -1.0], abs=1e-5) and with_failed[2] == 0.0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantages([float("nan"), 1.0])
    with pytest.raises(ValueError, match="shapes differ"):
        group_advantages(torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.bool), normalize_std=False)
