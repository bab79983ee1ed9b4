"""The order of a mixture: shares, seeds, resuming, and that nothing is left out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.prompts import PromptOrder
from moe_asyncrl.data.sources.mixture import BLOCK, MixtureOrder, quotas, shares

SIZES, WEIGHTS = (5, 1000, 70), (1.0, 2.5, 0.5)
weights = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=64)


def source_of(position: int, sizes: tuple[int, ...] = SIZES) -> int:
    return int(np.searchsorted(np.cumsum(sizes), position, side="right"))


def test_over_a_block_the_frequencies_are_the_weights_exactly() -> None:
    order = MixtureOrder(SIZES, WEIGHTS, seed=7, shuffle=True)
    found = Counter(source_of(order.at(i)[1]) for i in range(BLOCK))
    assert [found[i] for i in range(3)] == [BLOCK // 4, BLOCK * 5 // 8, BLOCK // 8] == quotas(WEIGHTS, BLOCK)


def test_in_a_short_run_they_scatter_as_draws_do_and_are_the_same_each_time() -> None:
    orders = [MixtureOrder(SIZES, WEIGHTS, seed=7, shuffle=shuffle) for shuffle in (True, False)]
    counts = [Counter(source_of(order.at(i)[1]) for i in range(2000)) for order in orders]
    assert counts[0] == counts[1]  # shuffling is inside the sources
    assert [counts[0][i] for i in range(3)] == [502, 1234, 264]  # checkpoints count on it
    expected = np.array(quotas(WEIGHTS, BLOCK)) / BLOCK * 2000
    sigma = np.sqrt(expected * (1 - expected / 2000))
    assert (np.abs([counts[0][i] for i in range(3)] - expected) < 4 * sigma).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31 - 1), st.integers(0, 3 * BLOCK), st.booleans())
def test_a_resumed_run_goes_on_with_the_same_prompts(seed: int, cursor: int, shuffle: bool) -> None:
    whole = MixtureOrder(SIZES, WEIGHTS, seed=seed, shuffle=shuffle)
    for i in range(max(0, cursor - 20), cursor):
        whole.at(i)
    resumed = MixtureOrder(SIZES, WEIGHTS, seed=seed, shuffle=shuffle)
    assert [whole.at(i) for i in range(cursor, cursor + 50)] == [resumed.at(i) for i in range(cursor, cursor + 50)]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=2, max_size=6), st.integers(0, 2**31 - 1))
def test_each_source_walks_through_itself_epoch_by_epoch(parts: list[tuple[int, float]], seed: int) -> None:
    sizes = tuple(n for n, _ in parts)
    order = MixtureOrder(sizes, [w for _, w in parts], seed=seed, shuffle=True)
    seen: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(parts))}
    for index in range(BLOCK - 1500, BLOCK + 1500):  # over the edge of a block
        epoch, position = order.at(index)
        seen[source_of(position, sizes)].append((epoch, position))
    for source, places in seen.items():
        epochs = [e for e, _ in places]
        assert epochs == sorted(epochs)
        for epoch in set(epochs[1:-1]) - {epochs[0], epochs[-1]}:
            assert len({p for e, p in places if e == epoch}) == sizes[source] == epochs.count(epoch)


def test_one_source_has_the_order_that_a_file_has() -> None:
    one, plain = MixtureOrder([9], [3.0], seed=3, shuffle=True), PromptOrder(9, seed=3, shuffle=True)
    assert [one.at(i) for i in range(40)] == [plain.at(i) for i in range(40)]


def test_two_sources_of_one_size_are_not_shuffled_alike() -> None:
    order = MixtureOrder([50, 50], [1, 1], seed=0, shuffle=True)
    places: dict[int, list[int]] = {0: [], 1: []}
    for i in range(200):
        epoch, position = order.at(i)
        if epoch == 0:
            places[position // 50].append(position % 50)
    assert places[0][:30] != places[1][:30]


@given(weights)
def test_quotas_fill_the_block_and_leave_nobody_out(given_weights: list[float]) -> None:
    found = quotas(given_weights, BLOCK)
    assert sum(found) == BLOCK and min(found) >= 1
    exact = np.array(given_weights) / np.sum(given_weights) * BLOCK
    assert all(abs(q - x) < 1 + len(found) for q, x in zip(found, exact, strict=True))


@given(st.integers(0, 500), st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 200)), min_size=1, max_size=8))
def test_shares_of_a_limit_are_filled_by_those_who_have_more(limit: int, parts: list[tuple[float, int]]) -> None:
    sizes = [n for _, n in parts]
    found = shares(limit, [w for w, _ in parts], sizes)
    assert sum(found) == min(limit, sum(sizes)) and all(0 <= f <= n for f, n in zip(found, sizes, strict=True))


def test_shares_follow_the_weights() -> None:
    assert shares(200, [1, 1], [1000, 1000]) == [100, 100]
    assert shares(200, [1, 1], [30, 1000]) == [30, 170]
    assert shares(10, [3, 1], [100, 100]) == [8, 2]
    assert shares(3, [1, 1], [1, 1]) == [1, 1]


@pytest.mark.parametrize("bad", [[0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_weights_that_are_none(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        quotas(bad, BLOCK)
