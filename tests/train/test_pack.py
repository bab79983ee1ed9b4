"""The packing's invariants, on any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.train.pack import Packing, pack, sequence_cost

LENGTHS = st.lists(st.integers(1, 300), min_size=0, max_size=60)


def loads(packing: Packing, lengths: list[int], crossover: int | None) -> list[float]:
    return [sum(sequence_cost(lengths[i], crossover) for mb in rank for i in mb) for rank in packing.ranks]


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    dp=st.integers(1, 5),
    limit=st.integers(1, 400),
    multiple=st.integers(1, 4),
    crossover=st.none() | st.integers(1, 1000),
)
def test_invariants(lengths: list[int], dp: int, limit: int, multiple: int, crossover: int | None) -> None:
    packing = pack(lengths, dp=dp, micro_batch_tokens=limit, crossover=crossover, multiple=multiple)
    assert sorted(i for rank in packing.ranks for mb in rank for i in mb) == list(range(len(lengths)))
    assert len(packing.ranks) == dp
    assert {len(rank) for rank in packing.ranks} == {packing.micro_batches}
    assert packing.micro_batches % multiple == 0
    for rank in packing.ranks:
        for mb in rank:
            assert sum(lengths[i] for i in mb) <= limit or len(mb) == 1
    if lengths:
        cost = loads(packing, lengths, crossover)
        largest = max(sequence_cost(n, crossover) for n in lengths)
        assert max(cost) <= sum(cost) / dp + largest + 1e-6
    assert pack(lengths, dp=dp, micro_batch_tokens=limit, crossover=crossover, multiple=multiple) == packing


def test_no_more_micro_batches_than_a_tight_packing_needs() -> None:
    packing = pack([60, 50, 50, 40], dp=1, micro_batch_tokens=100)
    assert packing.ranks == (((0, 3), (1, 2)),)


def test_micro_batches_of_a_rank_are_alike_and_like_meets_like() -> None:
    packing = pack([10] * 30, dp=2, micro_batch_tokens=100)
    sizes = [[len(mb) for mb in rank] for rank in packing.ranks]
    assert sizes == [[8, 7], [8, 7]]


def test_a_long_sequence_is_alone_and_others_get_dummies() -> None:
    packing = pack([500, 10, 10], dp=2, micro_batch_tokens=20)
    assert packing.ranks == (((0,),), ((1, 2),))
    packing = pack([500, 500, 10], dp=1, micro_batch_tokens=20)
    assert sorted(packing.ranks[0]) == [(0,), (1,), (2,)]


def test_many_sequences_are_quick_and_balanced() -> None:
    lengths = [1 + (i * 7919) % 4096 for i in range(8192)]
    packing = pack(lengths, dp=8, micro_batch_tokens=8192, crossover=4096)
    cost = loads(packing, lengths, 4096)
    assert max(cost) / min(cost) < 1.001
    filled = sum(lengths) / (8 * packing.micro_batches * 8192)
    assert filled > 0.95


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack([0], dp=1, micro_batch_tokens=8)
    with pytest.raises(ValueError, match="at least 1"):
        pack([1], dp=0, micro_batch_tokens=8)
