"""Modes and context parallelism in the trainer's role, with the real buffer and its slices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_asyncrl.config.recipe import Algorithm, Buffer, Optimizer, Replay, Rollout, Run, Trainer
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.telemetry.jsonl import read_jsonl
from tests.pool.pool import WorkerPool
from tests.train.scripted_run import Change, make_run, serving


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp("runs") / family for family in ("glm4_moe", "qwen3")}
    for family, path in found.items():
        make_tiny_model(path, family, 0, init_std=None, alphabet="ascii")
    return found


def steps(
    pool: WorkerPool, folder: Path, model: Path, trainer: Trainer, *, change: Change = lambda t: t, **sections: Any
) -> list[dict[str, Any]]:
    """The steps of a short run."""
    run, recipe = make_run(
        folder,
        model,
        run=Run(steps=2),
        rollout=Rollout(groups_per_step=4, group_size=3, max_new_tokens=16),
        trainer=trainer,
        # Adam's first steps are the signs of gradients, also of those that are rounding alone, but for a large eps.
        optimizer=Optimizer(lr=1e-2, eps=1e-4),
        buffer=Buffer(max_staleness=0, wait_s=30),
        **sections,
    )
    with serving(run, recipe, ModelSpec.from_hf(model), change=change):
        pool.run("tests.train.loop_jobs:go", layout=Layout.of(trainer), run=str(run.path), timeout_s=60)
    return [r for r in read_jsonl(run.metrics_path) if r["kind"] == "step"]


def without_routing(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, routing_experts=None, routing_runs=())


ONE = Trainer(micro_batch_tokens=48)
CP2 = Trainer(cp=2, ep=2, etp=1, micro_batch_tokens=24)


@pytest.mark.parametrize("mode", ["r3", "r2", "off"])
def test_a_run_over_context_parallel_ranks_is_that_of_one_process(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, mode: str
) -> None:
    options: dict[str, Any] = {"replay": Replay(mode=mode), "algorithm": Algorithm(updates_per_batch=2)}  # type: ignore[arg-type]
    if mode != "r3":
        options["change"] = without_routing
    one, two = (
        steps(pool, tmp_path / name, models["glm4_moe"], trainer, **options)
        for name, trainer in (("one", ONE), ("two", CP2))
    )
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "ratio_max", "entropy", "logprob_gap"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
        for name in ("tokens", "sequences", "replay_rows", "coverage"):
            assert b[name] == a[name], name
        assert (a["flip_rate"] is None) == (mode == "off")
    if mode == "r3":
        assert one[0]["coverage"] == 1.0 and one[0]["flip_rate"] > 0.5, "the sampler's rows are made up"
    if mode == "r2":
        assert 0 < one[0]["flip_rate"] < 0.5, "the second update's routers have moved away from the first's"


def test_a_model_without_routers_takes_every_mode(pool: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    found = [
        steps(pool, tmp_path / mode, models["qwen3"], Trainer(cp=2), change=without_routing, replay=Replay(mode=mode))  # type: ignore[arg-type]
        for mode in ("off", "r2", "r3")
    ]
    assert found[0][0]["grad_norm"] > 0 and found[0][0]["flip_rate"] is None
    for other in found[1:]:
        assert [s["loss"] for s in other] == pytest.approx([s["loss"] for s in found[0]], abs=1e-7)
