"""What becomes of a run that is broken off, and of its resume: see `chain.py` for how it is broken off."""

from __future__ import annotations

import signal

from tests.system.chain import LAST_STEPS, Chain, Stage
from tests.system.command import metrics


def resumed_rightly(stage: Stage) -> None:
    """It went on with the step after the checkpoint, and served nothing that the checkpoint had done."""
    start = stage.before["step"]
    assert stage.steps == tuple(range(start + 1, start + 1 + len(stage.steps)))
    printed = [line.split()[1] for line in stage.said.out.splitlines() if line.startswith("step")]
    # Whoever is killed right after its second step may not have printed it.
    assert printed and printed[:2] == [f"{step}/{stage.of}" for step in (start + 1, start + 2)][: len(printed)]
    cursor = stage.before["cursor"]
    assert min(stage.served) == cursor["watermark"]
    assert not set(stage.served) & {*range(cursor["watermark"]), *cursor["done"]}


def failed(stage: Stage) -> str:
    """The one line with which it failed."""
    assert stage.clean and stage.said.code == 1, stage.said
    assert len(stage.said.err.splitlines()) == 1, stage.said.err
    assert stage.came_to["status"] == "failed" and stage.said.err == f"moe-asyncrl: {stage.came_to['error']}\n"
    print(f"it ended {stage.ended_s:.1f} s after the harm")
    return stage.said.err


def test_an_interrupt_ends_the_run_with_a_checkpoint(chain: Chain) -> None:
    interrupted = chain["interrupted"]
    assert interrupted.clean and interrupted.said.code == 130 and interrupted.said.err == "", interrupted.said
    assert interrupted.came_to["status"] == "stopped" and interrupted.came_to["error"] is None
    assert interrupted.after["step"] == interrupted.steps[-1] >= 2
    assert interrupted.steps == tuple(range(1, 1 + len(interrupted.steps)))
    assert "stopping: the trainer finishes its step and writes a checkpoint" in interrupted.said.out


def test_a_lost_trainer_rank_ends_the_run(chain: Chain) -> None:
    trainer_lost = chain["trainer_lost"]
    assert "trainer-1 was killed by SIGKILL" in failed(trainer_lost)
    resumed_rightly(trainer_lost)
    assert trainer_lost.after["step"] >= trainer_lost.before["step"] + 1


def test_without_the_supervisor_everything_ends(chain: Chain) -> None:
    supervisor_lost = chain["supervisor_lost"]
    assert supervisor_lost.clean and supervisor_lost.said.code == -signal.SIGKILL
    assert supervisor_lost.came_to == {}
    resumed_rightly(supervisor_lost)


def test_the_only_engine_is_lost(chain: Chain) -> None:
    engine_lost = chain["engine_lost"]
    assert "moe-asyncrl: engine-0: the SGLang server ended (killed by signal 9)" in failed(engine_lost)
    resumed_rightly(engine_lost)


def test_one_of_two_engines_is_lost_and_the_run_goes_on(chain: Chain) -> None:
    stage = chain["one_of_two_lost"]
    assert stage.clean and stage.said.code == 0 and stage.said.err == "", stage.said
    resumed_rightly(stage)
    assert stage.came_to["status"] == "ok"
    assert stage.steps[-1] == stage.came_to["steps"] == stage.before["step"] + LAST_STEPS
    assert [line for line in stage.said.out.splitlines() if line.startswith("lost: engine-1: the SGLang server ended")]
    engines = [m["engines"] for m in metrics(stage.folder, "step")[-LAST_STEPS:]]
    assert engines[0] == 2 and engines[-1] == 1, engines
    assert stage.came_to["replay_coverage"] == 1.0
    # The whole account over all five starts: what was not trained went stale, failed, or is still on its way.
    account = stage.came_to["trajectories"]
    assert account["sampled"] >= account["trained"] + account["stale"] + account["failed"]


def test_no_step_is_missing_in_a_run_that_was_resumed(chain: Chain) -> None:
    """Only steps after the last checkpoint of a start were done again."""
    steps = [m["step"] for m in metrics(chain["one_of_two_lost"].folder, "step")]
    assert list(dict.fromkeys(steps)) == list(range(1, steps[-1] + 1))
