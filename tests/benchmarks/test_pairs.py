"""Measurements in turn: whose turn it is, ratios pair by pair, and what is no comparison."""

import pytest

from benchmarks.ours import SKIPPED_STEPS, steady
from benchmarks.pairs import Measured, median_interval, median_ratio, pair_ratios, turns


def test_sides_take_turns() -> None:
    assert turns(3) == ["ours", "peer", "ours", "peer", "ours", "peer"]


def test_each_pair_has_its_ratio_and_the_median_counts() -> None:
    # The machine was three times slower during the second pair: its ratio does not show that.
    ours = [Measured(1000, 5, 1.0), Measured(1000, 5, 3.0), Measured(900, 5, 1.0)]
    peer = [Measured(500, 5, 1.0), Measured(500, 5, 3.0), Measured(450, 5, 5.0)]
    assert pair_ratios(ours, peer) == pytest.approx([2.0, 2.0, 10.0])
    assert median_ratio(ours, peer) == pytest.approx(2.0)


def test_unequal_work_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="not the same work"):
        pair_ratios([Measured(10, 5, 1.0)], [Measured(10, 4, 1.0)])
    with pytest.raises(ValueError, match="not the same work"):
        pair_ratios([Measured(10, 5, 1.0)], [])
    with pytest.raises(ValueError, match="the measurement is broken"):
        pair_ratios([Measured(10, 5, 1.0)], [Measured(10, 5, 0.0)])


def test_the_first_steps_do_not_count_and_the_time_between_steps_does() -> None:
    lines = [{"time": 100.0 + 2.0 * i, "tokens": 7 + i} for i in range(SKIPPED_STEPS + 3)]
    measured, begin, end = steady(lines)
    assert measured == Measured(sum(7 + i for i in range(SKIPPED_STEPS, SKIPPED_STEPS + 3)), 3, 6.0)
    assert (begin, end) == (100.0 + 2.0 * (SKIPPED_STEPS - 1), 100.0 + 2.0 * (SKIPPED_STEPS + 2))
    with pytest.raises(ValueError, match="too few"):
        steady(lines[:SKIPPED_STEPS])


def test_the_interval_of_a_median_is_the_one_of_the_tables() -> None:
    # Conover, table A3: of 10 values the 2nd and the 9th, of 100 the 40th and the 61st (at least 95 %).
    assert median_interval([float(i) for i in range(10, 0, -1)]) == (2.0, 9.0)
    assert median_interval([float(i) for i in range(1, 101)]) == (40.0, 61.0)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    with pytest.raises(ValueError, match="at least 6 values, there are 5"):
        median_interval([1.0] * 5)
