"""Additions: the two sides never share a pair."""

from __future__ import annotations

import pytest

from moe_asyncrl.data.arithmetic import additions


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_pair_is_on_both_sides_in_either_order(seed: int) -> None:
    training, held_out = additions(below=100, held_out=200, seed=seed)
    assert len(held_out) == 200
    sides = [{frozenset((s.a, s.b)) for s in side} for side in (training, held_out)]
    assert not sides[0] & sides[1]
    assert len({(s.a, s.b) for s in training}) == len(training) > 9000
    assert all(s.record()["answer"] == str(s.a + s.b) for s in held_out)


def test_the_same_seed_gives_the_same_sums_and_too_few_numbers_are_refused() -> None:
    assert additions(below=30, held_out=20, seed=5) == additions(below=30, held_out=20, seed=5)
    assert additions(below=30, held_out=20, seed=5) != additions(below=30, held_out=20, seed=6)
    with pytest.raises(ValueError, match="below 3"):
        additions(below=3, held_out=200, seed=0)
