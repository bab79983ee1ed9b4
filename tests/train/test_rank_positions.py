"""Positions of a rank: everything once, in Megatron-Core's order, and the slices that routers see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patches.packed_rope import packed_positions
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.rank_positions import positions_of_rank

SIZES = st.sampled_from([1, 2, 3, 4])
LENGTHS = st.lists(st.integers(1, 40), max_size=8)


@settings(deadline=None)
@given(LENGTHS, SIZES, SIZES, SIZES, st.sampled_from([1, 2, 12]))
def test_every_row_is_routed_once_and_every_token_held_once(
    lengths: list[int], tp: int, cp: int, pp: int, multiple: int
) -> None:
    layout = Layout(tp=tp, cp=cp, pp=pp)
    everything = [(i, p) for i, n in enumerate(lengths) for p in range(n)]
    for stage in range(pp):
        ranks = range(stage * tp * cp, (stage + 1) * tp * cp)
        found = [positions_of_rank(lengths, layout, rank, multiple=multiple) for rank in ranks]
        assert len({one.length for one in found}) == 1 and found[0].length * cp % multiple == 0
        routed = [(i, int(p)) for one in found for i in range(len(lengths)) for p in one.rows_of(i)]
        assert sorted(routed) == everything
        for first in range(tp):
            held = [(i, int(p)) for one in found[first::tp] for i in range(len(lengths)) for p in one.tokens_of(i)]
            assert sorted(held) == everything
        assert all(one.length == (one.routed.stop - one.routed.start) * tp for one in found)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.sampled_from([2, 4]))
def test_the_order_is_megatrons(lengths: list[int], cp: int) -> None:
    layout = Layout(cp=cp)
    for rank in range(cp):
        one = positions_of_rank(lengths, layout, rank)
        offsets = torch.tensor([0, *np.cumsum(one.sizes).tolist()])
        assert (packed_positions(offsets, rank, cp).numpy() == one.position).all()
        assert (one.sizes % (2 * cp) == 0).all()


def test_without_context_parallelism_sequences_are_not_padded() -> None:
    one = positions_of_rank([3, 5], Layout(tp=4), 1)
    assert one.sizes.tolist() == [3, 5] and one.real.all() and one.routed == slice(2, 4)
    two = positions_of_rank([3], Layout(tp=2, cp=2), 3)
    # Whole: 0 1 2 and padding; rank (tp 1, cp 1) holds parts 1 and 2, and routes the second of them.
    assert two.sizes.tolist() == [4] and two.position.tolist() == [1, 2]
    assert two.rows_of(0).tolist() == [2]


def test_nothing_but_padding_still_has_positions() -> None:
    one = positions_of_rank([], Layout(tp=2, cp=2), 0)
    assert one.length == 2 and not one.real.any() and one.sizes.tolist() == [4]


@pytest.mark.parametrize("cp", [1, 2])
def test_moving_a_row_by_one_would_be_seen(cp: int) -> None:
    layout = Layout(cp=cp)
    rows = np.concatenate([positions_of_rank([7, 9], layout, rank).rows_of(1) for rank in range(cp)])
    assert sorted(rows) == list(range(9))
    assert sorted(rows + 1) != list(range(9))
