"""Layouts: rank coordinates as Megatron-Core orders them, layers of stages, and sizes that do not fit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from tests.pool.pool import WorkerPool

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any valid layout with small sizes."""
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    ranks = tp * cp * dp
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    rest = ranks // ep
    etp = tp if ep == 1 else draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    vpp = draw(st.sampled_from([None, 1, 2, 3])) if pp > 1 else None
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, vpp=vpp)


@given(layouts())
def test_coordinates_are_a_bijection_in_both_orders(layout: Layout) -> None:
    every = [layout.coordinates(rank) for rank in range(layout.world_size)]
    dense = {(c.tp, c.cp, c.dp, c.pp) for c in every}
    expert = {(c.etp, c.ep, c.edp, c.pp) for c in every}
    assert len(dense) == len(expert) == layout.world_size
    for rank, c in enumerate(every):
        assert rank == c.tp + layout.tp * (c.cp + layout.cp * (c.dp + layout.dp * c.pp))
        assert rank == c.etp + layout.etp * (c.ep + layout.ep * (c.edp + layout.edp * c.pp))


@given(layouts(), st.integers(1, 3))
def test_every_layer_has_one_owner(layout: Layout, layers_a_stage: int) -> None:
    layers = layers_a_stage * layout.pp * layout.chunks
    owned = [
        (layer, (rank, chunk))
        for rank in range(layout.pp)
        for chunk in range(layout.chunks)
        for layer in layout.layers_of(rank, chunk, layers)
    ]
    assert sorted(layer for layer, _ in owned) == list(range(layers))
    assert all(layout.owner_of_layer(layer, layers) == owner for layer, owner in owned)


@given(layouts(), st.integers(1, 3))
def test_every_expert_has_one_rank(layout: Layout, experts_a_rank: int) -> None:
    experts = experts_a_rank * layout.ep
    assert [e for rank in range(layout.ep) for e in layout.experts_of(rank, experts)] == list(range(experts))


MEGATRON = [
    Layout(),
    Layout(dp=4),
    Layout(dp=2, ep=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2, ep=4),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(tp=2, cp=2, ep=2),
    Layout(dp=2, pp=2, ep=2),
    Layout(cp=2, dp=2, ep=2),
    Layout(pp=4),
]


@pytest.mark.parametrize("layout", MEGATRON, ids=str)
def test_coordinates_are_megatrons(layout: Layout, pool: WorkerPool) -> None:
    found = pool.run("moe_asyncrl.train.parallel:parallel_coordinates", layout=layout)
    assert found == [asdict(layout.coordinates(rank)) for rank in range(layout.world_size)]


UNEVEN = [Layout(pp=2, stage_layers=(3, 5)), Layout(pp=2, vpp=2, stage_layers=(1, 3, 2, 2))]


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, vpp=2), Layout(pp=4), *UNEVEN], ids=str)
def test_layers_are_megatrons(layout: Layout, pool: WorkerPool) -> None:
    found = pool.run("tests.train.layout_jobs:own_layers", layout=layout, num_layers=8)
    for rank, chunks in enumerate(found):
        expected = [list(layout.layers_of(rank, chunk, 8)) for chunk in range(layout.chunks)]
        assert chunks == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"dp": -1}, "dp is -1"),
        ({"vpp": 2}, "needs pp >= 2"),
        ({"ep": 2}, "cannot hold"),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 4}, "cannot hold"),
        ({"tp": 2, "etp": 1}, "must then equal tp 2"),
        ({"pp": 2, "stage_layers": (5,)}, "it needs 2 numbers"),
        ({"pp": 2, "stage_layers": (5, 0)}, "each at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_one_clear_error(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Layout(**sizes)
    assert "\n" not in str(caught.value)


def test_questions_outside_the_layout_are_errors() -> None:
    layout = Layout(pp=2)
    for question in (
        lambda: layout.coordinates(2),
        lambda: layout.layers_of(0, 0, 5),
        lambda: layout.layers_of(0, 1, 4),
        lambda: layout.owner_of_layer(4, 4),
        lambda: Layout(dp=2, ep=2).experts_of(0, 3),
    ):
        with pytest.raises(UserError, match="layout"):
            question()


def test_expert_tensor_parallelism_follows_tp_only_without_expert_parallelism() -> None:
    assert Layout(tp=2).etp == 2
    assert Layout(tp=2, ep=2).etp == 1
    assert str(Layout(tp=2, ep=2, dp=3, pp=2, vpp=2)) == "tp2xpp2xvpp2xep2xdp3"
