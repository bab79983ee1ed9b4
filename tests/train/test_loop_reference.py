"""The trainer's role with a KL to a reference: what it is measured against, and that a resume does not move that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import Algorithm, Recipe, Run, Warmup
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import newest_complete
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation
from tests.train.test_loop import GROUPS, SIZE, go, run_of, steps_of

Weights = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy, and another model of its kind."""
    folder = tmp_path_factory.mktemp("trainer")
    for seed, name in ((0, "policy"), (1, "reference")):
        make_tiny_model(folder / name, "qwen3_moe", seed, init_std=None, alphabet="ascii", num_hidden_layers=2)
    return folder / "policy", folder / "reference"


def with_reference(folder: RunFolder, recipe: Recipe, reference: Path) -> Recipe:
    chosen = msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, reference=str(reference)))
    folder.recipe.write_text(dump_recipe(chosen))
    return chosen


def resumed(folder: RunFolder, recipe: Recipe, steps: int, **sections: Any) -> Recipe:
    again = msgspec.structs.replace(recipe, run=Run(steps=steps, resume=True), **sections)
    folder.recipe.write_text(dump_recipe(again))
    return again


def weights_of(answers: list[dict[str, Any]]) -> Weights:
    return assemble([each["weights"] for each in answers])


def test_without_a_path_it_is_the_policy_after_warm_up_and_stays_so(
    pool: WorkerPool, models: tuple[Path, Path], tmp_path: Path
) -> None:
    sections = {
        "warmup": Warmup(steps=2, batch_size=8),
        "run": Run(steps=4),
        "algorithm": Algorithm(kl_coef=0.1, updates_per_batch=2),
    }
    whole, recipe = run_of(tmp_path / "whole", models[0], **sections)
    answers, _ = go(pool, whole, recipe)
    series = [s["kl_reference"] for s in steps_of(whole)]
    # The second update of the first batch is away from the reference already, by one small step of the schedule.
    assert 0 < series[0] < 0.1 * series[1] and all(kl > 1e-6 for kl in series[1:])

    cut, recipe = run_of(tmp_path / "cut", models[0], **sections)
    go(pool, cut, recipe, stop_after=2)
    again = resumed(cut, recipe, 4)
    last, _ = go(pool, cut, again)
    # Against the weights of the resume the third step's KL would be as small as the first one's.
    assert [s["kl_reference"] for s in steps_of(cut)] == pytest.approx(series, rel=1e-4)
    assert deviation(weights_of(last), weights_of(answers)) < 1e-6


def test_a_path_is_measured_against_and_changes_nothing_until_it_has_a_weight(
    pool: WorkerPool, models: tuple[Path, Path], tmp_path: Path
) -> None:
    found: dict[str, tuple[dict[str, Any], Weights]] = {}
    for name, algorithm in {
        "none": Algorithm(),
        "measured": Algorithm(),
        "loss": Algorithm(kl_coef=0.05),
        "reward": Algorithm(kl_coef=0.05, kl_in="reward", kl_estimator="k1"),
    }.items():
        folder, recipe = run_of(tmp_path / name, models[0], run=Run(steps=2), algorithm=algorithm)
        if name != "none":
            recipe = with_reference(folder, recipe, models[1])
        answers, _ = go(pool, folder, recipe)
        steps = steps_of(folder)
        found[name] = steps[0], weights_of(answers)
        assert steps[0]["staleness_histogram"] == [GROUPS * SIZE]
        assert newest_complete(folder.reference) is None, "a path needs no copy in the run folder"
    assert "kl_reference" not in found["none"][0]
    assert found["measured"][0]["kl_reference"] > 0.1, "two random models"
    for name in ("loss", "reward"):
        assert found[name][0]["kl_reference"] == found["measured"][0]["kl_reference"]
        assert found[name][0]["reward"] == found["none"][0]["reward"], "the metric is the reward as scored"
        assert deviation(found[name][1], found["none"][1]) > 1e-3
    loss = {name: step["loss"] for name, (step, _) in found.items()}
    assert loss["measured"] == loss["none"]
    assert loss["loss"] - loss["none"] == pytest.approx(0.05 * found["loss"][0]["kl_reference"], rel=1e-4)
    assert deviation(found["measured"][1], found["none"][1]) == 0.0


def test_a_resume_that_wants_a_reference_which_was_not_kept_is_refused(
    pool: WorkerPool, models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, recipe = run_of(tmp_path / "run", models[0], run=Run(steps=1))
    go(pool, folder, recipe)
    again = resumed(folder, recipe, 2, algorithm=Algorithm(kl_coef=0.1))
    with pytest.raises(WorkerFailed, match=r"reference: the weights that this run started from were not kept"):
        go(pool, folder, again)
