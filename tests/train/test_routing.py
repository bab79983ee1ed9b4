"""What a probe says of routing: exact on every layout, and what hooks on the routers of one process saw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.routing import RoutingCounts, routing_record
from tests.pool.pool import WorkerPool
from tests.train.parity_jobs import tiny_spec
from tests.train.step_jobs import samples

JOB = "tests.train.score_jobs:probed"


@pytest.fixture(scope="module")
def one(pool: WorkerPool) -> tuple[RoutingCounts, dict[int, list[torch.Tensor]]]:
    ((found, chosen),) = pool.run(JOB, layout=Layout())
    return found.routing, chosen


def test_the_counts_are_those_of_the_samples_and_of_the_routers(
    one: tuple[RoutingCounts, dict[int, list[torch.Tensor]]],
) -> None:
    counts, chosen = one
    spec = tiny_spec()
    assert counts.layers == [1, 2, 3], "the first layer is dense"
    rows = np.concatenate([s.experts for s in samples(spec)])  # type: ignore[misc]
    for i in range(spec.num_moe_layers):
        passes = len(chosen[i]) // 2
        replayed, live = torch.cat(chosen[i][:passes]), torch.cat(chosen[i][passes:])
        assert counts.load_sampler[i] == np.bincount(rows[:, i].ravel(), minlength=spec.num_experts).tolist()
        assert counts.load_trainer[i] == live.sum(0).tolist()
        assert counts.flips[i] == pytest.approx(float((replayed != live).any(-1).double().mean()))
        assert counts.load_trainer[i] != counts.load_sampler[i]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, ep=2),
        Layout(pp=2),
        Layout(pp=2, dp=2, ep=2),
        Layout(tp=2),
        Layout(pp=2, vpp=2),
        Layout(tp=2, cp=2),
    ],
    ids=str,
)
def test_every_layout_counts_the_same(
    pool: WorkerPool, one: tuple[RoutingCounts, dict[int, list[torch.Tensor]]], layout: Layout
) -> None:
    for found, _ in pool.run(JOB, layout=layout):
        assert found.routing == one[0]


def test_rows_of_the_next_layer_are_seen(
    pool: WorkerPool, one: tuple[RoutingCounts, dict[int, list[torch.Tensor]]]
) -> None:
    ((found, _),) = pool.run(JOB, layout=Layout(), shift=1)
    assert found.routing.load_trainer == one[0].load_trainer, "the trainer's own choice does not look at the rows"
    assert found.routing.load_sampler == [one[0].load_sampler[i] for i in (2, 0, 1)]
    assert found.routing.flips != one[0].flips


def test_rows_that_are_missing_are_counted_on_neither_side(pool: WorkerPool) -> None:
    spec = tiny_spec()
    rows = np.concatenate([s.experts[1:] for s in samples(spec)])  # type: ignore[index]
    for found, _ in pool.run(JOB, layout=Layout(dp=2, ep=2), missing=True):
        counts = found.routing
        for i in range(spec.num_moe_layers):
            assert counts.load_sampler[i] == np.bincount(rows[:, i].ravel(), minlength=spec.num_experts).tolist()
            assert sum(counts.load_trainer[i]) == sum(counts.load_sampler[i])
            # Decisions without a row are no agreement either: the part is of those that have one.
            assert (counts.flips[i] * len(rows)) == pytest.approx(round(counts.flips[i] * len(rows)))


def test_a_dense_model_has_nothing_to_say(pool: WorkerPool) -> None:
    ((found, _),) = pool.run(JOB, layout=Layout(), dense=True)
    assert found.routing is None and found.kl_replay is None and found.kl_live > 0


def test_the_record(one: tuple[RoutingCounts, dict[int, list[torch.Tensor]]]) -> None:
    record = routing_record(20, 19, one[0])
    assert set(record) == {"kind", "step", "version", "layers", "flips", "load_sampler", "load_trainer"}
    assert (record["kind"], record["step"], record["version"]) == ("routing", 20, 19)
    assert all(len(record[name]) == 3 for name in ("layers", "flips", "load_sampler", "load_trainer"))
    assert all(len(row) == 8 for row in record["load_sampler"] + record["load_trainer"])
