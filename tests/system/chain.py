"""One run that is broken off in every way and resumed each time: interrupted, a trainer rank killed, the supervisor
killed, the only engine killed, and at last one of two engines killed, with which it ends well.

The stages build on each other, so each start serves as the resume of the one before. The prompts are served in file
order and each has its number, which the reward function writes down: what is served after a resume shows which
instances the checkpoint held to be done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from moe_asyncrl.config.load import load_recipe
from tests.system.command import Command, Said, metrics
from tests.system.projects import make_project

END_S = 180.0
"""Longest end of a run after what ends it, on a busy machine."""
LAST_STEPS = 12
"""Steps of the last stage."""

Name = Literal["interrupted", "trainer_lost", "supervisor_lost", "engine_lost", "one_of_two_lost"]


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
    ended_s: float
    """From the harm to its end, for the report of a failed test."""


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

    def stage(self, harm: Callable[[Command], object], *overrides: str) -> Stage:
        """Start (or resume), let it do steps, do harm, and wait for the end."""
        before = newest(self.path)
        resume = ["run.resume=true"] if before else []
        with Command(self.path, "run", "recipe.yaml", *resume, *overrides) as command:
            command.until_step(before.get("step", 0) + 2)
            harm(command)
            began = time.monotonic()
            said = command.wait(END_S)
            ended_s = time.monotonic() - began
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
            ended_s=ended_s,
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


class Chain:
    """All stages, one after the other in a thread, so that other tests run meanwhile."""

    def __init__(self, path: Path, model: Path) -> None:
        """Two trainer ranks that share the experts, one engine, a checkpoint after each step."""
        self._home = Home(
            make_project(
                path,
                model,
                prompts=20000,
                run={"steps": 100000},
                data={"shuffle": False},
                trainer={"dp": 2, "ep": 2},
                checkpoint={"every": 1},
            )
        )
        self._thread = ThreadPoolExecutor(1)
        go = self._home.stage
        self._stages: dict[Name, Future[Stage]] = {
            "interrupted": self._thread.submit(go, lambda command: command.interrupt()),
            "trainer_lost": self._thread.submit(go, lambda command: command.role("trainer-1").kill()),
            "supervisor_lost": self._thread.submit(go, lambda command: command.process.kill()),
            "engine_lost": self._thread.submit(go, lambda command: kill(servers(command, "engine-0"))),
            "one_of_two_lost": self._thread.submit(self._last),
        }

    def __getitem__(self, name: Name) -> Stage:
        """The stage once it is over. Raises what went wrong in it."""
        return self._stages[name].result()

    def close(self) -> None:
        """No further stage."""
        self._thread.shutdown(cancel_futures=True)

    def _last(self) -> Stage:
        steps = newest(self._home.path)["step"] + LAST_STEPS
        kill_one = lambda command: kill(servers(command, "engine-1"))  # noqa: E731
        return self._home.stage(kill_one, "engine.count=2", f"run.steps={steps}")
