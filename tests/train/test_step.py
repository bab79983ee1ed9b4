"""The step's gradient is that of the global loss, whatever the layout and the packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_asyncrl.models.layout import Layout
from tests.pool.pool import WorkerPool
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation

TOLERANCE = 1e-5


def gradients(pool: WorkerPool, layout: Layout, **options: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    answers = pool.run("tests.train.step_jobs:policy_gradients", layout=layout, **options)
    assert all(answer[:2] == answers[0][:2] for answer in answers), "every rank gets the same figures"
    return answers[0][0], assemble([answer[2] for answer in answers])


def plain(pool: WorkerPool, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ((loss, parts),) = pool.run("tests.train.step_jobs:plain_gradients", layout=Layout(), **options)
    return loss, assemble([parts])


@pytest.fixture(scope="module")
def reference(pool: WorkerPool) -> tuple[float, dict[str, torch.Tensor]]:
    return plain(pool)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), {"tokens": 4096}),
        (Layout(), {"tokens": 30}),
        (Layout(dp=2, ep=2), {}),
        (Layout(dp=2, ep=2), {"recompute": "full"}),
        (Layout(pp=2), {"recompute": "selective"}),
        (Layout(pp=2, vpp=2), {}),
        (Layout(tp=2, ep=2), {}),
        (Layout(tp=2, etp=2), {}),
        (Layout(pp=2, dp=2, ep=2), {"tokens": 30}),
        (Layout(cp=2), {"tokens": 30}),
        (Layout(tp=2, cp=2), {}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_gradients_equal_the_plain_loss(
    pool: WorkerPool, reference: tuple[float, dict[str, torch.Tensor]], layout: Layout, options: dict[str, Any]
) -> None:
    sums, found = gradients(pool, layout, **options)
    assert sums["loss"] == pytest.approx(reference[0], abs=TOLERANCE * abs(reference[0]))
    assert deviation(found, reference[1]) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), {"tokens": 30, "recompute": "full"}),
        (Layout(dp=2, ep=2), {"recompute": "full"}),
        (Layout(pp=2, dp=2, ep=2), {"recompute": "full"}),
        (Layout(pp=2, vpp=2), {}),
        (Layout(tp=2, ep=2), {"tokens": 30}),
        (Layout(cp=2), {"recompute": "full"}),
        (Layout(cp=2, ep=2), {"tokens": 30}),
        (Layout(pp=2, cp=2, ep=2), {}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_replayed_sequence_mean_with_old_policy(
    pool: WorkerPool, layout: Layout, options: dict[str, Any], replayed: tuple[float, dict[str, torch.Tensor]]
) -> None:
    sums, found = gradients(pool, layout, replay=True, old=True, aggregation="sequence_mean", **options)
    assert sums["loss"] == pytest.approx(replayed[0], abs=TOLERANCE * abs(replayed[0]))
    assert deviation(found, replayed[1]) < TOLERANCE
    assert sums["decisions"] == 3 * sums["real_positions"], "each real position in each of three MoE layers, once"
    assert sums["missing"] == 0
    assert sums["flipped"] > 0.5 * sums["decisions"], "random rows are not what the router would choose"


@pytest.fixture(scope="module")
def replayed(pool: WorkerPool) -> tuple[float, dict[str, torch.Tensor]]:
    return plain(pool, replay=True, old=True, aggregation="sequence_mean")


def test_gates_learn_from_replayed_rows(replayed: tuple[float, dict[str, torch.Tensor]]) -> None:
    routers = {name: g for name, g in replayed[1].items() if "router" in name}
    assert routers and all(bool((g != 0).any()) for g in routers.values())


@pytest.mark.parametrize("plant", ["swap_experts", "transpose_projection"])
def test_a_planted_error_is_seen(
    pool: WorkerPool, reference: tuple[float, dict[str, torch.Tensor]], plant: str
) -> None:
    _, found = gradients(pool, Layout(dp=2, ep=2), plant=plant)
    assert deviation(found, reference[1]) > 100 * TOLERANCE


def test_live_routing_is_not_the_replayed_one(
    pool: WorkerPool, replayed: tuple[float, dict[str, torch.Tensor]]
) -> None:
    _, found = gradients(pool, Layout(dp=2, ep=2), old=True, aggregation="sequence_mean")
    assert deviation(found, replayed[1]) > 100 * TOLERANCE


def test_the_figures_do_not_depend_on_the_cut(pool: WorkerPool) -> None:
    cut = ("positions", "real_positions", "sequences")
    whole, _, _ = pool.run("tests.train.step_jobs:policy_gradients", layout=Layout(), old=True, tokens=4096)[0]
    for layout, tokens in ((Layout(), 30), (Layout(dp=2, ep=2), 48), (Layout(pp=2), 48), (Layout(cp=2), 24)):
        sums, _, _ = pool.run("tests.train.step_jobs:policy_gradients", layout=layout, old=True, tokens=tokens)[0]
        for name in whole.keys() - set(cut):
            assert sums[name] == pytest.approx(whole[name], rel=1e-5), name
        assert sums["sequences"] == 14
    assert whole["clipped"] > 0 and whole["capped"] > 0, "the test data reach every branch"
