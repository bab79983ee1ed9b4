"""Checkpoints of whole trainer runs: written while steps are trained, and a run that dies before one is complete."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import Buffer, Checkpoint, Run, Trainer
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import complete_steps, newest_complete, numbered
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation
from tests.train.test_loop import GROUPS, SIZE, STEPS, go, model, run_of, steps_of

__all__ = ["model"]  # the fixture

SINGLE = Layout()
EVERY_2 = Checkpoint(every=2, keep=1, keep_every=4)


def spans(folder: RunFolder, name: str, role: str) -> list[dict[str, Any]]:
    return [e for e in read_jsonl(folder.events_path) if (e["span"], e["role"]) == (name, role)]


def resumed(folder: RunFolder, recipe: Any, **sections: Any) -> Any:
    again = msgspec.structs.replace(recipe, run=Run(steps=STEPS, resume=True), **sections)
    folder.recipe.write_text(dump_recipe(again))
    return again


def test_steps_are_trained_while_a_checkpoint_is_written(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    folder, recipe = run_of(tmp_path / "run", model, checkpoint=EVERY_2)
    go(pool, folder, recipe, hold=2)
    assert complete_steps(folder.checkpoints) == [4, 6], "the newest, and the multiple of four"
    for role in ("trainer-0", "trainer-1"):
        writes = spans(folder, "checkpoint_write", role)
        assert [w["step"] for w in writes] == [2, 4, 6] and all(w["bytes"] > 0 for w in writes)
        assert all(a["end"] <= b["start"] for a, b in pairwise(writes)), "one at a time"
        (third,) = [s for s in spans(folder, "step", role) if s["step"] == 3]
        assert writes[0]["start"] <= third["start"] and third["end"] <= writes[0]["end"]
        assert all(c["end"] <= w["end"] for c, w in zip(spans(folder, "checkpoint", role), writes[:1], strict=False))

    waits, recipe = run_of(tmp_path / "waits", model, checkpoint=Checkpoint(every=2, asynchronous=False))
    go(pool, waits, recipe)
    for saved, write in zip(
        spans(waits, "checkpoint", "trainer-0"), spans(waits, "checkpoint_write", "trainer-0"), strict=True
    ):
        assert saved["start"] <= write["start"] and write["end"] <= saved["end"]


def test_what_a_lost_checkpoint_consumed_is_trained_again_and_only_once(
    pool: WorkerPool, model: Path, tmp_path: Path
) -> None:
    """The trainer dies after step 5, when that of step 4 is copied but not on the disk; it goes on on other layouts."""
    whole, recipe = run_of(tmp_path / "whole", model)
    expected, _ = go(pool, whole, recipe)

    folder, recipe = run_of(tmp_path / "run", model, checkpoint=EVERY_2)
    with pytest.raises(WorkerFailed, match="the process died"):
        go(pool, folder, recipe, hold=4, dies=True)
    assert [step for step, _ in numbered(folder.checkpoints)] == [2, 4]
    found = newest_complete(folder.checkpoints)
    assert found is not None and found[1].step == 2
    assert found[1].cursor.watermark == 2 * GROUPS and found[1].counters.trained == 2 * GROUPS * SIZE
    first_life = steps_of(folder)

    again = resumed(folder, recipe, trainer=Trainer(micro_batch_tokens=48))
    answers, service = go(pool, folder, again, layout=SINGLE)
    assert [v for v, _ in answers[0]["published"]] == [2, 3, 4, 5, 6], "the weights of step 2 are sent first"
    assert service.ledger.counters.trained == STEPS * GROUPS * SIZE
    assert service.ledger.cursor().watermark >= STEPS * GROUPS
    second_life = steps_of(folder)[len(first_life) :]
    assert [s["step"] for s in second_life] == [3, 4, 5, 6]
    whole_steps = steps_of(whole)
    for life in (first_life, second_life):
        for step in life:
            same = whole_steps[step["step"] - 1]
            assert step["lr"] == pytest.approx(same["lr"]), "the schedule goes on, once a step"
            assert step["loss"] == pytest.approx(same["loss"], abs=1e-6)
            assert step["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-5)
    # After four steps whose gradients differ in the last digits, which Adam divides by their own size.
    assert deviation(*(assemble([r["weights"] for r in x]) for x in (answers, expected))) < 1e-4
    assert complete_steps(folder.checkpoints) == [4, 6]


def test_another_layout_is_the_same_run(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    """A recipe may change `trainer` between lives: what must stay is what the cursor and the weights mean."""
    folder, recipe = run_of(tmp_path / "run", model, checkpoint=Checkpoint(), run=Run(steps=2))
    go(pool, folder, recipe)
    again = resumed(
        folder,
        recipe,
        trainer=Trainer(tp=2, ep=2, etp=1, micro_batch_tokens=64),
        checkpoint=Checkpoint(every=3),
        buffer=Buffer(max_staleness=0, wait_s=20),
    )
    answers, _ = go(pool, folder, again, layout=Layout(tp=2, ep=2))
    assert [v for v, _ in answers[0]["published"]] == [2, 3, 4, 5, 6]
    whole, recipe = run_of(tmp_path / "whole", model)
    expected, _ = go(pool, whole, recipe)
    assert deviation(*(assemble([r["weights"] for r in x]) for x in (answers, expected))) < 1e-4
