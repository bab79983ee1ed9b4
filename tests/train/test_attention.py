"""Packed attention: batches cover every sequence, and the result is that of one call a sequence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.train.packed_batches import CALL_COST, group_by_length, make_batches
from tests.pool.pool import WorkerPool

LENGTHS = st.lists(st.integers(0, 700), max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([16, 64, 1024]), st.sampled_from([64, 1024, 8192]))
def test_groups_cover_every_sequence_once_within_the_bounds(lengths: list[int], width: int, bound: int) -> None:
    groups = group_by_length(lengths, width=width, max_padded_tokens=bound)
    assert sorted(number for group in groups for number in group) == [n for n, length in enumerate(lengths) if length]
    for group in groups:
        longest = max(lengths[number] for number in group)
        assert len(group) == 1 or len(group) * longest <= bound
        assert all(width * (longest**2 - lengths[number] ** 2) <= CALL_COST for number in group)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 2]))
def test_every_token_is_moved_and_found_again(lengths: list[int], cp_size: int) -> None:
    lengths = [length * 2 * cp_size if cp_size > 1 else length for length in lengths]
    plan = make_batches(lengths, width=64, cp_size=cp_size)
    assert plan.queries[plan.order].tolist() == list(range(sum(lengths) // cp_size))
    assert sum(batch.rows * batch.length for batch in plan.batches) == len(plan.queries)
    assert len(plan.keys) == cp_size * len(plan.queries)


def test_lengths_that_context_parallelism_cannot_split_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2"):
        make_batches([4, 6], width=64, cp_size=2)


SHAPES = {"grouped": (4, 2, 16, 16), "one head each": (4, 4, 16, 16), "latent": (4, 4, 24, 16)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batched_attention_equals_a_softmax_written_out(shape: tuple[int, int, int, int], pool: WorkerPool) -> None:
    """Against float64 with one sequence at a time; looking one token ahead must be seen."""
    (answer,) = pool.run("tests.train.attention_jobs:packed_against_float64", shape=shape)
    assert answer["worst"] < 1e-5
    assert answer["planted"] > 1e-3
    assert answer["batches"] > 1


KINDS = {"windows": {"window": 6}, "sinks": {"sinks": True}, "windows and sinks": {"window": 6, "sinks": True}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_windows_and_sinks_equal_a_softmax_written_out(kind: dict[str, Any], pool: WorkerPool) -> None:
    """The gradient of the sinks included; without window or sinks the deviation must be seen."""
    (answer,) = pool.run("tests.train.attention_jobs:packed_against_float64", shape=SHAPES["grouped"], **kind)
    assert answer["worst"] < 1e-5
    assert answer["planted"] > 1e-3


@pytest.mark.parametrize("kind", [{}, KINDS["windows and sinks"]], ids=["plain", "windows and sinks"])
@pytest.mark.parametrize("packing", ["packed", "not packed"])
def test_context_parallel_attention_equals_one_rank(packing: str, kind: dict[str, Any], pool: WorkerPool) -> None:
    from moe_asyncrl.models.layout import Layout

    for worst in pool.run(
        "tests.train.attention_jobs:spread_over_context", layout=Layout(cp=2), packing=packing, **kind
    ):
        assert worst < 1e-5
