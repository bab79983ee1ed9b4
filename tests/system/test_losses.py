"""One run that is broken off in every way and resumed each time: interrupted, a trainer rank killed, the supervisor
killed, the only engine killed, and at last one of two engines killed, with which it ends well.

The stages build on each other, so a start serves as the resume of the one before; each is a fixture and has its test.
The prompts are served in file order and each has its number, which the reward function writes down: what is served
after a resume shows which instances the checkpoint held to be done.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_asyncrl.config.load import load_recipe
from tests.system.command import Command, Said, metrics
from tests.system.projects import make_project

END_S = 90.0
"""Longest end of a run after what ends it, on a busy machine."""


@dataclass(frozen=True)
class Stage:
    """One start of the run, from its resume to how it ended."""

    said: Said
    folder: Path
    came_to: dict[str, Any]
    """Its summary; empty if nobody was left to write one."""
    steps: tuple[int, ...]
    """Steps that this start has done."""
    served: tuple[int, ...]
    """Numbers of the prompts whose completions were scored."""
    before: dict[str, Any]
    """Side file of the checkpoint that it could resume from; empty without one."""
    after: dict[str, Any]
    """Side file of the newest complete checkpoint afterwards."""
    of: int
    """Steps of the recipe."""
    clean: bool
    """Nothing of it was left soon after its end."""


def newest(home: Path) -> dict[str, Any]:
    """Side file of the newest complete checkpoint."""
    sides = sorted((home / "runs" / "latest" / "checkpoints").glob("step-*/trainer.json"))
    return json.loads(sides[-1].read_text()) if sides else {}


class Home:
    """The user's folder, in which the run is started again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = 0
        self._calls = 0

    def stage(self, harm: Any, *overrides: str) -> Stage:
        """Start (or resume), let it do steps, do harm, and wait for the end."""
        before = newest(self.path)
        resume = ["run.resume=true"] if before else []
        with Command(self.path, "run", "recipe.yaml", *resume, *overrides) as command:
            command.until_step(before.get("step", 0) + 2)
            harm(command)
            began = time.monotonic()
            said = command.wait(END_S)
            print(f"it ended {time.monotonic() - began:.1f} s after the harm\n{said.out}{said.err}")
            clean = command.none_left()
        lines = metrics(command.folder)
        calls = (self.path / "calls.txt").read_text().splitlines()
        written = command.folder / "summary.json"
        stage = Stage(
            said=said,
            folder=command.folder,
            came_to=json.loads(written.read_text()) if written.exists() else {},
            steps=tuple(m["step"] for m in lines[self._metrics :] if m["kind"] == "step"),
            served=tuple(int(call) for call in calls[self._calls :]),
            before=before,
            after=newest(self.path),
            of=load_recipe(command.folder / "recipe.yaml").run.steps,
            clean=clean,
        )
        self._metrics, self._calls = len(lines), len(calls)
        return stage


def servers(command: Command, engine: str) -> list[psutil.Process]:
    """SGLang's own processes of an engine."""
    family = command.role(engine).children(recursive=True)
    assert len(family) >= 3, family
    return [p for p in family if "guard.py" not in " ".join(p.cmdline())]


def kill(processes: list[psutil.Process]) -> None:
    """Kill them all at once."""
    for process in processes:
        process.kill()


def resumed_rightly(stage: Stage) -> None:
    """It went on with the step after the checkpoint, and served nothing that the checkpoint had done."""
    start = stage.before["step"]
    assert stage.steps == tuple(range(start + 1, start + 1 + len(stage.steps)))
    printed = [line.split()[1] for line in stage.said.out.splitlines() if line.startswith("step")]
    assert printed[:2] == [f"{step}/{stage.of}" for step in (start + 1, start + 2)]
    cursor = stage.before["cursor"]
    assert min(stage.served) == cursor["watermark"]
    assert not set(stage.served) & {*range(cursor["watermark"]), *cursor["done"]}


def failed(stage: Stage) -> str:
    """The one line with which it failed."""
    assert stage.clean and stage.said.code == 1, stage.said
    assert len(stage.said.err.splitlines()) == 1, stage.said.err
    assert stage.came_to["status"] == "failed" and stage.said.err == f"moe-asyncrl: {stage.came_to['error']}\n"
    return stage.said.err


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Home:
    """Two trainer ranks that share the experts, one engine, a checkpoint after each step."""
    return Home(
        make_project(
            tmp_path_factory.mktemp("losses") / "mine",
            small_model,
            prompts=20000,
            run={"steps": 100000},
            data={"shuffle": False},
            trainer={"dp": 2, "ep": 2},
            checkpoint={"every": 1},
        )
    )


@pytest.fixture(scope="module")
def interrupted(home: Home) -> Stage:
    """Ctrl-C."""
    return home.stage(lambda command: command.interrupt())


@pytest.fixture(scope="module")
def trainer_lost(home: Home, interrupted: Stage) -> Stage:
    """kill -9 of the second trainer rank."""
    return home.stage(lambda command: command.role("trainer-1").kill())


@pytest.fixture(scope="module")
def supervisor_lost(home: Home, trainer_lost: Stage) -> Stage:
    """kill -9 of the command itself."""
    return home.stage(lambda command: command.process.kill())


@pytest.fixture(scope="module")
def engine_lost(home: Home, supervisor_lost: Stage) -> Stage:
    """kill -9 of the only engine's processes."""
    return home.stage(lambda command: kill(servers(command, "engine-0")))


@pytest.fixture(scope="module")
def one_of_two_lost(home: Home, engine_lost: Stage) -> Stage:
    """kill -9 of one of two engines; the run has 20 steps more to do."""
    steps = engine_lost.after["step"] + 20
    return home.stage(lambda command: kill(servers(command, "engine-1")), "engine.count=2", f"run.steps={steps}")


def test_an_interrupt_ends_the_run_with_a_checkpoint(interrupted: Stage) -> None:
    assert interrupted.clean and interrupted.said.code == 130 and interrupted.said.err == "", interrupted.said
    assert interrupted.came_to["status"] == "stopped" and interrupted.came_to["error"] is None
    assert interrupted.after["step"] == interrupted.steps[-1] >= 2
    assert interrupted.steps == tuple(range(1, 1 + len(interrupted.steps)))
    assert "stopping: the trainer finishes its step and writes a checkpoint" in interrupted.said.out


def test_a_lost_trainer_rank_ends_the_run(trainer_lost: Stage) -> None:
    assert "trainer-1 was killed by SIGKILL" in failed(trainer_lost)
    resumed_rightly(trainer_lost)
    assert trainer_lost.after["step"] >= trainer_lost.before["step"] + 1


def test_without_the_supervisor_everything_ends(supervisor_lost: Stage) -> None:
    assert supervisor_lost.clean and supervisor_lost.said.code == -signal.SIGKILL
    assert supervisor_lost.came_to == {}
    resumed_rightly(supervisor_lost)


def test_the_only_engine_is_lost(engine_lost: Stage) -> None:
    assert "moe-asyncrl: engine-0: the SGLang server ended (killed by signal 9)" in failed(engine_lost)
    resumed_rightly(engine_lost)


def test_one_of_two_engines_is_lost_and_the_run_goes_on(one_of_two_lost: Stage) -> None:
    stage = one_of_two_lost
    assert stage.clean and stage.said.code == 0 and stage.said.err == "", stage.said
    resumed_rightly(stage)
    assert stage.came_to["status"] == "ok" and stage.steps[-1] == stage.came_to["steps"] == stage.before["step"] + 20
    assert [line for line in stage.said.out.splitlines() if line.startswith("lost: engine-1: the SGLang server ended")]
    engines = [m["engines"] for m in metrics(stage.folder, "step")[-20:]]
    assert engines[0] == 2 and engines[-1] == 1, engines
    assert stage.came_to["replay_coverage"] == 1.0
    # The whole account over all five starts: what was not trained went stale, failed, or is still on its way.
    account = stage.came_to["trajectories"]
    assert account["sampled"] >= account["trained"] + account["stale"] + account["failed"]


def test_no_step_is_missing_in_a_run_that_was_resumed(one_of_two_lost: Stage) -> None:
    """Only steps after the last checkpoint of a start were done again."""
    steps = [m["step"] for m in metrics(one_of_two_lost.folder, "step")]
    assert list(dict.fromkeys(steps)) == list(range(1, steps[-1] + 1))
