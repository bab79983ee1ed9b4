"""Rows: what fits a token, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import RoutingRun
from moe_asyncrl.replay.rows import (
    Coverage,
    Owner,
    ReplayMismatch,
    check_rows,
    coverage,
    name_of,
    owners_within,
    padding_rows,
)

OWNERS = [Owner("a", 0, 3), Owner("b", 3, 5)]


def good() -> torch.Tensor:
    return torch.tensor([0, 1, 2]).expand(5, 2, 3).contiguous()


def test_good_rows_pass_and_unknown_ones_are_not_looked_at() -> None:
    known = torch.tensor([True, True, True, False, True])
    rows = good()
    rows[3] = 200
    check_rows(rows, known, OWNERS, num_experts=4, layers=(1, 5), rank=0)


@pytest.mark.parametrize("value", [-1, 4])
def test_an_expert_out_of_range_names_trajectory_row_layer_and_rank(value: int) -> None:
    rows = good()
    rows[4, 1, 0] = value
    with pytest.raises(ReplayMismatch, match=r"trajectory b, row 1, MoE layer 5, rank 3: .*outside"):
        check_rows(rows, torch.ones(5, dtype=torch.bool), OWNERS, num_experts=4, layers=(1, 5), rank=3)


def test_an_expert_twice_is_refused() -> None:
    rows = good()
    rows[2, 0, 2] = 0
    with pytest.raises(ReplayMismatch, match=r"trajectory a, row 2, MoE layer 1, rank 0: .*twice"):
        check_rows(rows, torch.ones(5, dtype=torch.bool), OWNERS, num_experts=4, layers=(1, 5), rank=0)


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 8), st.integers(0, 8))
def test_padding_rows_are_distinct_and_spread(tokens: int, layers: int, top_k: int, more: int) -> None:
    experts = top_k + more
    rows = padding_rows(tokens, layers, top_k, experts)
    assert rows.shape == (tokens, layers, top_k)
    check_rows(rows, torch.ones(tokens, dtype=torch.bool), [], num_experts=experts, layers=range(layers), rank=0)
    load = torch.bincount(rows[:, 0].flatten(), minlength=experts)
    assert int(load.max() - load.min()) <= 1


def test_owners_of_a_part_keep_their_rows() -> None:
    owners = [Owner("a", 0, 3, 4), Owner("a", 3, 5, 10), Owner("b", 5, 8)]
    assert owners_within(owners, slice(1, 6)) == (Owner("a", 0, 2, 5), Owner("a", 2, 4, 10), Owner("b", 4, 5, 0))
    assert owners_within(owners, slice(6, 8)) == (Owner("b", 0, 2, 1),)
    assert name_of(owners, 4) == "trajectory a, row 11"


def test_coverage_compares_each_row_with_the_weights_of_its_token() -> None:
    # Tokens:   p  p  p  s  s  s ; the switch from version 4 to 5 happened before the last token.
    mask = np.array([False, False, False, True, True, True])
    version = np.array([-1, -1, -1, 4, 4, 5], dtype=np.int32)
    runs = (
        RoutingRun(start=0, end=3, version=4, source="prefilled"),
        RoutingRun(start=3, end=4, version=4, source="sampled"),
        RoutingRun(start=4, end=5, version=5, source="sampled"),
    )
    assert coverage(runs, mask, version) == Coverage(rows=5, known=5, same_version=5)
    rerouted = (
        RoutingRun(start=0, end=4, version=5, source="prefilled"),
        RoutingRun(start=4, end=5, version=-1, source="missing"),
    )
    assert coverage(rerouted, mask, version) == Coverage(rows=5, known=4, same_version=0)
