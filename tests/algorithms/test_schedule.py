"""Schedules: end points, continuity, and independence of how one got to a step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from moe_asyncrl.algorithms.schedule import Schedule, learning_rate

KINDS: tuple[Schedule, ...] = ("constant", "linear", "cosine")


def rates(kind: Schedule, warmup: int, total: int, ratio: float) -> list[float]:
    return [
        learning_rate(s, peak=2.0, schedule=kind, warmup_steps=warmup, total_steps=total, min_ratio=ratio)
        for s in range(total + 5)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_reaches_the_peak_and_starts_above_zero(kind: Schedule) -> None:
    r = rates(kind, 4, 20, 0.1)
    assert r[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert max(r) == 2.0


@pytest.mark.parametrize("kind", ("linear", "cosine"))
def test_falls_to_the_last_rate_and_stays(kind: Schedule) -> None:
    r = rates(kind, 4, 20, 0.1)
    assert r[19:] == pytest.approx([0.2] * 6)
    assert all(a > b for a, b in pairwise(r[3:20]))
    middle = r[11]
    assert middle == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))


def test_constant_and_degenerate_totals() -> None:
    assert rates("constant", 0, 3, 0.0) == [2.0] * 8
    assert rates("cosine", 3, 3, 0.5)[3:] == pytest.approx([1.0] * 5)
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, peak=1.0, schedule="linear", warmup_steps=0, total_steps=1, min_ratio=0.0)
