"""Figures of the experts' load, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.telemetry.expert_load import collapsing, layer_load, load_fields, load_of


def test_an_even_load_and_a_collapsed_one() -> None:
    even, one = layer_load([5] * 8), layer_load([40] + [0] * 7)
    assert even is not None and one is not None
    assert (even.busiest, even.cv, even.entropy, even.idle) == (1.0, 0.0, pytest.approx(1.0), 0)
    assert (one.busiest, one.entropy, one.idle) == (8.0, 0.0, 7) and one.cv == pytest.approx(math.sqrt(7))
    two = layer_load([20, 20] + [0] * 6)
    assert two is not None and two.entropy == pytest.approx(math.log(2) / math.log(8))
    assert layer_load([0] * 8) is None and load_of([[0, 0]]) is None and load_fields([], []) == {}


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=64).filter(any))
def test_by_definition(counts: list[int]) -> None:
    found = layer_load(counts)
    n = np.asarray(counts, dtype=np.float64)
    p = n[n > 0] / n.sum()
    assert found is not None
    assert found.busiest == pytest.approx(n.max() * len(n) / n.sum()) and found.cv == pytest.approx(n.std() / n.mean())
    assert found.entropy == pytest.approx(-(p * np.log(p)).sum() / np.log(len(n)), abs=1e-12)
    assert found.idle == counts.count(0) and -1e-12 <= found.entropy <= 1 + 1e-12


def test_both_sides_and_the_worst_layer() -> None:
    sampler, trainer = [[4, 4, 4, 4], [0, 0, 0, 0]], [[16, 0, 0, 0], [4, 4, 4, 4]]
    fields = load_fields(sampler, trainer)
    assert fields["load_entropy_sampler"] == pytest.approx(1.0) and fields["load_entropy_trainer"] == 0.0
    assert (fields["load_busiest_sampler"], fields["load_busiest_trainer"]) == (1.0, 2.5)
    assert (fields["idle_experts_sampler"], fields["idle_experts_trainer"]) == (0, 3)


def test_a_collapsing_layer_is_named_and_few_tokens_are_not() -> None:
    assert collapsing([3, 4, 7], [[40, 40, 0, 0, 0, 0, 0, 0], [10] * 8, [4, 4, 0, 0, 0, 0, 0, 0]]) == [3]
