"""The trainer's role with the real buffer: steps, a stop, a resume, and batches that must not be trained on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_asyncrl.algorithms.schedule import learning_rate
from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import (
    Algorithm,
    Buffer,
    Checkpoint,
    Optimizer,
    Recipe,
    Replay,
    Rollout,
    Run,
    Trainer,
    Warmup,
)
from moe_asyncrl.data.trajectory import RoutingRun, Trajectory
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import newest_complete
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.scripted_run import Change, make_run, serving
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation

JOB = "tests.train.loop_jobs:go"
EP2 = Layout(dp=2, ep=2)
STEPS = 6
GROUPS, SIZE = 4, 3
SCHEDULE = Optimizer(lr=1e-2, schedule="linear", warmup_steps=2, min_lr_ratio=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "model"
    make_tiny_model(path, "qwen3_moe", 0, init_std=None, alphabet="ascii", num_hidden_layers=2)
    return path


def run_of(path: Path, model: Path, **sections: Any) -> tuple[RunFolder, Recipe]:
    chosen: dict[str, Any] = {
        "run": Run(steps=STEPS),
        "rollout": Rollout(groups_per_step=GROUPS, group_size=SIZE, max_new_tokens=16),
        "trainer": Trainer(dp=2, ep=2, micro_batch_tokens=48),
        "optimizer": SCHEDULE,
        # Without staleness, which groups make up a batch is certain.
        "buffer": Buffer(max_staleness=0, wait_s=30),
    }
    return make_run(path, model, **(chosen | sections))


def steps_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [r for r in read_jsonl(folder.metrics_path) if r["kind"] == "step"]


def go(
    pool: WorkerPool,
    folder: RunFolder,
    recipe: Recipe,
    *,
    change: Change = lambda t: t,
    layout: Layout = EP2,
    **options: Any,
) -> tuple[list[dict[str, Any]], Any]:
    with serving(folder, recipe, ModelSpec.from_hf(recipe.model.path), change=change) as service:
        answers = pool.run(JOB, layout=layout, run=str(folder.path), timeout_s=60, **options)
    return answers, service


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    folder, recipe = run_of(tmp_path / "whole", model)
    whole, service = go(pool, folder, recipe)
    assert whole[0]["phase"] == "finishing"
    assert [v for v, _ in whole[0]["published"]] == list(range(STEPS + 1))
    assert service.ledger.counters.trained == STEPS * GROUPS * SIZE

    cut, recipe = run_of(tmp_path / "cut", model)
    stopped, _ = go(pool, cut, recipe, stop_after=3)
    assert [v for v, _ in stopped[0]["published"]] == [0, 1, 2, 3]
    found = newest_complete(cut.checkpoints)
    assert found is not None and found[1].step == 3
    assert found[1].cursor.watermark == 3 * GROUPS, "the cursor stands behind what was trained"
    assert found[1].counters.trained == 3 * GROUPS * SIZE

    again = msgspec.structs.replace(recipe, run=Run(steps=STEPS, resume=True))
    cut.recipe.write_text(dump_recipe(again))
    resumed, service = go(pool, cut, again)
    # The weights of step 3 are sent, under their version, before anything is trained on.
    assert resumed[0]["published"][0] == (3, 3)
    assert [v for v, _ in resumed[0]["published"]] == [3, 4, 5, 6]
    assert service.ledger.counters.trained == STEPS * GROUPS * SIZE, "nothing is lost or trained twice"
    steps = steps_of(cut)
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    rates = [
        learning_rate(i, peak=1e-2, schedule="linear", warmup_steps=2, total_steps=STEPS, min_ratio=0.1)
        for i in range(STEPS)
    ]
    assert [s["lr"] for s in steps] == pytest.approx(rates), "the schedule goes on, once a step"
    for a, b in zip(steps, steps_of(folder), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-5
        )
        assert a["coverage"] == a["coverage_same_version"] == 1.0
        assert a["staleness_max"] == 0
    whole_weights, resumed_weights = (assemble([r["weights"] for r in x]) for x in (whole, resumed))
    assert deviation(resumed_weights, whole_weights) < 1e-6
    assert deviation(assemble([r["weights"] for r in stopped]), whole_weights) > 1e-4


def with_run(source: str) -> Change:
    def change(t: Trajectory) -> Trajectory:
        runs = (
            RoutingRun(start=0, end=2, version=0, source="sampled"),
            RoutingRun(start=2, end=t.length - 1, version=-1, source=source),  # type: ignore[arg-type]
        )
        return dataclasses.replace(t, routing_runs=runs)

    return change


def twice(t: Trajectory) -> Trajectory:
    assert t.routing_experts is not None
    experts = t.routing_experts.copy()
    experts[3, 1] = experts[3, 1, 0]
    return dataclasses.replace(t, routing_experts=experts)


def too_many_layers(t: Trajectory) -> Trajectory:
    assert t.routing_experts is not None
    return dataclasses.replace(t, routing_experts=np.concatenate([t.routing_experts, t.routing_experts[:, :1]], axis=1))


def without(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, routing_experts=None, routing_runs=())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (twice, r"trajectory \d+\.0\.\d, row 3, MoE layer 1, rank [01]: row has an expert twice"),
        (
            too_many_layers,
            r"trajectory \d+\.0\.\d, rank [01]: routing rows \[\d+, 3, 2\] for \d+ input tokens, 2 MoE layers",
        ),
        (with_run("missing"), r"trajectory \d+\.0\.\d, row 2, .*rank [01]: the sampler reported no routing"),
        (without, r"trajectory \d+\.0\.\d, row 0, .*rank [01]: the sampler reported no routing"),
    ],
    ids=["duplicate", "layers", "missing", "dropped"],
)
def test_a_row_that_does_not_fit_stops_the_step(
    pool: WorkerPool, model: Path, tmp_path: Path, change: Change, said: str
) -> None:
    """Faults 30 and 34 among them: the field dropped on its way, and rows that the sampler does not have."""
    folder, recipe = run_of(tmp_path / "run", model)
    with pytest.raises(WorkerFailed, match=said) as caught:
        go(pool, folder, recipe, change=change)
    assert "did not answer" not in str(caught.value), "all ranks stop, none waits in a collective"
    assert steps_of(folder) == []


def test_missing_rows_may_be_allowed_and_are_counted(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    folder, recipe = run_of(tmp_path / "run", model, replay=Replay(allow_missing=True), run=Run(steps=1))
    go(pool, folder, recipe, change=with_run("missing"))
    (step,) = steps_of(folder)
    rows = [5 + index % 5 for index in range(GROUPS) for _ in range(SIZE)]
    assert step["replay_rows"] == sum(rows)
    assert step["coverage"] == pytest.approx(2 * len(rows) / sum(rows))
    assert 0 < step["coverage_same_version"] <= step["coverage"]


def test_several_updates_use_the_policy_at_the_start_of_the_batch(
    pool: WorkerPool, model: Path, tmp_path: Path
) -> None:
    folder, recipe = run_of(tmp_path / "run", model, algorithm=Algorithm(updates_per_batch=2), run=Run(steps=2))
    go(pool, folder, recipe)
    for step in steps_of(folder):
        assert step["ratio_max"] > 1.001, "the second update's policy has moved away from the batch's first"
        assert 0.5 < step["ratio_mean"] < 2.0
        assert step["tokens"] == sum(
            (6 + i % 5 + 1) // 2 * SIZE for i in range(GROUPS * (step["step"] - 1), GROUPS * step["step"])
        )
    one, recipe = run_of(tmp_path / "one", model, run=Run(steps=1))
    go(pool, one, recipe)
    assert steps_of(one)[0]["ratio_max"] == 1.0


def test_waiting_for_a_batch_has_a_deadline_that_says_what_it_waited_for(
    pool: WorkerPool, model: Path, tmp_path: Path
) -> None:
    # The buffer takes no trajectory with tokens of another type, so that no batch ever fills.
    folder, recipe = run_of(tmp_path / "run", model, buffer=Buffer(max_staleness=0, wait_s=1.0))
    with pytest.raises(WorkerFailed, match=r"waited 1 s for 4 groups for step 1: 0 are held"):
        go(pool, folder, recipe, change=lambda t: dataclasses.replace(t, tokens=t.tokens.astype(np.int64)))


def test_supervised_runs_learn_and_resume(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    sections = {
        "algorithm": Algorithm(objective="sft"),
        "warmup": Warmup(batch_size=16),
        "optimizer": Optimizer(lr=5e-3),
        "run": Run(steps=12),
        "checkpoint": Checkpoint(every=6),
    }
    whole, recipe = run_of(tmp_path / "whole", model, **sections)
    first, _ = go(pool, whole, recipe)
    losses = [s["loss"] for s in steps_of(whole)]
    assert losses[-1] < 0.7 * losses[0]
    cut, recipe = run_of(tmp_path / "cut", model, **sections)
    go(pool, cut, recipe, stop_after=7)
    again = msgspec.structs.replace(recipe, run=Run(steps=12, resume=True))
    cut.recipe.write_text(dump_recipe(again))
    resumed, _ = go(pool, cut, again)
    assert [s["loss"] for s in steps_of(cut)] == pytest.approx(losses, abs=1e-6)
    a, b = (assemble([r["weights"] for r in x]) for x in (resumed, first))
    assert deviation(a, b) < 1e-6


def test_warm_up_comes_first_and_never_twice(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    sections = {"warmup": Warmup(steps=3, batch_size=8), "checkpoint": Checkpoint(every=10), "run": Run(steps=1)}
    folder, recipe = run_of(tmp_path / "run", model, **sections)
    go(pool, folder, recipe, stop_after=0)  # asked to stop at once: no checkpoint, as the warm-up is not done
    assert newest_complete(folder.checkpoints) is None
    answers, _ = go(pool, folder, recipe)
    assert [v for v, _ in answers[0]["published"]] == [0, 1]
    again = msgspec.structs.replace(recipe, run=Run(steps=2, resume=True))
    folder.recipe.write_text(dump_recipe(again))
    answers, _ = go(pool, folder, again)
    assert [v for v, _ in answers[0]["published"]] == [1, 2]
    kinds = [r["kind"] for r in read_jsonl(folder.metrics_path)]
    assert kinds == ["warmup"] * 3 + ["step"] * 2


def test_a_resume_with_other_prompts_is_refused(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    folder, recipe = run_of(tmp_path / "run", model, run=Run(steps=1))
    go(pool, folder, recipe)
    again = msgspec.structs.replace(recipe, run=Run(steps=2, resume=True, seed=5))
    folder.recipe.write_text(dump_recipe(again))
    with pytest.raises(WorkerFailed, match=r"run\.seed, data\.train, data\.shuffle or algorithm\.objective changed"):
        go(pool, folder, again)
