"""Scoring by replayed and live routing, against one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest

from moe_asyncrl.models.layout import Layout
from tests.pool.pool import WorkerPool
from tests.train.parity_jobs import tiny_spec
from tests.train.step_jobs import samples

JOB = "tests.train.score_jobs:scores"
TOLERANCE = 1e-5


def deviation(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    assert all(np.isnan(x[0]) for x in a)
    return max(float(np.abs(x[1:] - y[1:]).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["replay", "off"])
def test_every_rank_of_every_layout_gets_the_same_scores(pool: WorkerPool, mode: str) -> None:
    whole, _ = pool.run(JOB, layout=Layout(), mode=mode)[0]
    for layout in (Layout(dp=2, ep=2), Layout(pp=2, dp=2, ep=2), Layout(tp=2, ep=2), Layout(pp=2, vpp=2), Layout(cp=2)):
        for found, _ in pool.run(JOB, layout=layout, mode=mode):
            assert deviation(found, whole) < TOLERANCE, layout
    shifted, _ = pool.run(JOB, layout=Layout(), mode="replay", shift=1)[0]
    assert deviation(shifted, whole) > 100 * TOLERANCE, "rows of the next layer would be seen"


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, ep=2), Layout(pp=2, dp=2, ep=2), Layout(tp=2, ep=2), Layout(cp=2, ep=2)], ids=str
)
def test_the_routers_choose_exactly_the_rows_that_were_given(pool: WorkerPool, layout: Layout) -> None:
    """Read by hooks on the routers, over all ranks: each token's experts in each layer, as often as given."""
    spec = tiny_spec()
    given = samples(spec)
    answers = pool.run(JOB, layout=layout, mode="replay", spy=True)
    for number in range(spec.num_moe_layers):
        wanted = np.concatenate([s.experts[:, number] for s in given])  # type: ignore[index]
        wanted_maps = np.zeros((len(wanted), spec.num_experts), dtype=bool)
        np.put_along_axis(wanted_maps, wanted.astype(np.int64), True, axis=1)
        found = np.concatenate([m.numpy() for _, chosen in answers for m in chosen.get(number, [])]).astype(bool)
        assert found.shape[1] == spec.num_experts
        as_counts = lambda maps: dict(zip(*np.unique(np.packbits(maps, axis=1), return_counts=True), strict=True))  # noqa: E731
        want, have = as_counts(wanted_maps), as_counts(found)
        assert all(have.get(row, 0) >= n for row, n in want.items())
        padding = len(found) - len(wanted)
        most = 4 if layout.cp == 1 else 4 + len(given) * (2 * layout.cp - 1)
        assert 0 <= padding <= most and sum(have.values()) == sum(want.values()) + padding
