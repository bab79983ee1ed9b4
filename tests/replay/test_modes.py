"""`r2`: the trainer's own pass decides. And what routers count, with replay and without: no padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.policy import after_first, routing_mode
from tests.pool.pool import WorkerPool
from tests.replay.matrix import Matrix, experts_by_token, samples_for
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(pool, tmp_path_factory.mktemp("modes"))


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(), "full"),
        (Layout(pp=2, vpp=2), "full"),
        (Layout(tp=2, ep=2), "off"),
        (Layout(cp=2, ep=2), "selective"),
    ],
    ids=str,
)
def test_the_updates_take_the_experts_of_the_old_policys_pass(matrix: Matrix, layout: Layout, recompute: str) -> None:
    path, spec = matrix.model("glm4_moe")
    given = samples_for(spec)
    job, common = "tests.replay.mode_jobs:own_routing", {"hf_dir": path, "given": given, "recompute": recompute}
    answers = matrix.pool.run(job, layout=layout, **common)
    decisions = sum(len(s.tokens) - 1 for s in given) * spec.num_moe_layers
    assert sum(a["other"] for a in answers) == 0
    assert sum(a["same"] for a in answers) == decisions * (2 if recompute == "full" else 1)
    sums = answers[0]["sums"]
    assert sums["decisions"] == decisions and sums["missing"] == 0
    assert sums["flipped"] > 0.2 * decisions, "the moved routers would have chosen otherwise"
    if layout == Layout():
        live = matrix.pool.run(job, layout=layout, follow="off", **common)
        assert sum(a["other"] for a in live) > 0.2 * decisions, "the witness can tell"


def test_what_a_recipe_asks_for_and_what_passes_do() -> None:
    assert [routing_mode(mode) for mode in ("off", "r2", "r3")] == ["off", "record", "replay"]
    assert [after_first(mode) for mode in ("off", "record", "replay")] == ["off", "replay", "replay"]


@pytest.fixture(scope="module")
def counts(matrix: Matrix) -> Callable[..., tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]]:
    """Loads by layer and whole gradients of a step of a model with biased routers, under a balance loss."""

    def run(layout: Layout, *, mode: str = "replay", multiple: int = 1, count: int = 99, **options: Any) -> Any:
        path, spec = matrix.model("deepseek_v3")
        answers = matrix.pool.run(
            "tests.replay.mode_jobs:counted_by_routers",
            layout=layout,
            hf_dir=path,
            given=samples_for(spec)[:count],
            mode=mode,
            multiple=multiple,
            **options,
        )
        loads: dict[int, torch.Tensor] = {}
        for layer, load in (pair for a in answers for pair in a["loads"].items()):
            loads[layer] = loads.get(layer, 0) + load
        return loads, assemble([a["gradients"] for a in answers])

    return run


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2), Layout(tp=2, ep=2)], ids=str)
def test_padding_is_in_no_statistic(matrix: Matrix, counts: Callable[..., Any], layout: Layout) -> None:
    """One micro-batch of 77 tokens, padded to 160: the loads are the rows', and the gradients those without padding."""
    _, spec = matrix.model("deepseek_v3")
    (loads, found), (_, whole) = counts(layout, multiple=160), counts(Layout())
    table = torch.from_numpy(experts_by_token(spec)).long()
    for i, layer in enumerate(spec.moe_layer_indices):
        rows = torch.cat([table[torch.from_numpy(s.tokens[:-1]).long(), i] for s in samples_for(spec)])
        assert torch.equal(loads[layer], torch.bincount(rows.flatten(), minlength=spec.num_experts).double())
    assert deviation(found, whole) < TOLERANCE


@pytest.mark.parametrize("mode", ["replay", "off"])
def test_padding_that_is_not_told_of_would_be_seen(matrix: Matrix, counts: Callable[..., Any], mode: str) -> None:
    _, spec = matrix.model("deepseek_v3")
    (loads, found), (_, whole) = counts(Layout(), mode=mode, multiple=160), counts(Layout(), mode=mode)
    assert all(load.sum() == 77 * spec.experts_per_token for load in loads.values())
    assert deviation(found, whole) < TOLERANCE
    (loads, found) = counts(Layout(), mode=mode, multiple=160, plant=True)
    assert all(load.sum() == 160 * spec.experts_per_token for load in loads.values())
    assert deviation(found, whole) > 100 * TOLERANCE


def test_a_micro_batch_of_padding_adds_nothing_to_a_balance_loss(counts: Callable[..., Any]) -> None:
    """One sample for two replicas: one of them has nothing but padding."""
    assert deviation(counts(Layout(dp=2, ep=2), count=1)[1], counts(Layout(), count=1)[1]) < TOLERANCE
