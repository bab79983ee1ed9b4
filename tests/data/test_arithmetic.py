"""Additions: the two sides never share a pair, and the pupil forgets as often as asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.arithmetic import additions, careless, without_carries


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_pair_is_on_both_sides_in_either_order(seed: int) -> None:
    training, held_out = additions(below=100, held_out=200, seed=seed)
    assert len(held_out) == 200
    sides = [{frozenset((s.a, s.b)) for s in side} for side in (training, held_out)]
    assert not sides[0] & sides[1]
    assert len({(s.a, s.b) for s in training}) == len(training) > 9000
    for s in held_out:
        left, _, right = s.record()["prompt"].rstrip("=").partition("+")
        assert int(left) + int(right) == s.a + s.b == int(s.record()["answer"])
        assert len(s.record()["prompt"]) == 6


def test_the_same_seed_gives_the_same_sums_and_too_few_numbers_are_refused() -> None:
    assert additions(below=30, held_out=20, seed=5) == additions(below=30, held_out=20, seed=5)
    assert additions(below=30, held_out=20, seed=5) != additions(below=30, held_out=20, seed=6)
    with pytest.raises(ValueError, match="below 3"):
        additions(below=3, held_out=200, seed=0)


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_forgetting_carries_adds_digit_by_digit(a: int, b: int) -> None:
    digits = [(int(x) + int(y)) % 10 for x, y in zip(f"{a:04d}", f"{b:04d}", strict=True)]
    assert without_carries(a, b) == int("".join(map(str, digits)))
    if all(int(x) + int(y) < 10 for x, y in zip(f"{a:04d}", f"{b:04d}", strict=True)):
        assert without_carries(a, b) == a + b


def test_the_pupil_forgets_anew_each_time_and_never_sees_a_held_out_sum() -> None:
    training, held_out = additions(below=100, held_out=200, seed=0)
    lines = careless(training, forgets=0.65, times=4, seed=0)
    assert len(lines) == 4 * len(training)
    carrying = [s for s in training if without_carries(s.a, s.b) != s.a + s.b]
    right = {s.record()["prompt"]: str(s.a + s.b) for s in carrying}
    shown = [line for line in lines if line["prompt"] in right]
    share = sum(line["answer"] == right[line["prompt"]] for line in shown) / len(shown)
    assert share == pytest.approx(0.35, abs=0.01)
    by_prompt: dict[str, set[str]] = {}
    for line in shown:
        by_prompt.setdefault(line["prompt"], set()).add(line["answer"])
    assert sum(len(answers) == 2 for answers in by_prompt.values()) > 0.7 * len(by_prompt)
    assert not {s.record()["prompt"] for s in held_out} & {line["prompt"] for line in lines}
