"""Runs that fail at or soon after their start, and a run without engines. They run side by side: they mostly wait."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.command import Command, metrics, summary
from tests.system.projects import make_project


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[dict[str, Command]]:
    """The running commands, by name."""
    home = tmp_path_factory.mktemp("starts")
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = taken.getsockname()[1]
        recipes = {
            "port": {"engine": {"base_port": port}},
            "flag": {"engine": {"extra_args": ["--no-such-flag"]}},
            "judge": {"reward": {"function": "rewards:always_fails", "max_consecutive_failures": 24}},
            "at once": {"run": {"steps": 100000}},
            "early": {"run": {"steps": 100000}},
            "sft": {
                "run": {"steps": 20},
                "algorithm": {"objective": "sft"},
                "warmup": {"batch_size": 20},
                "optimizer": {"lr": 3e-3},
            },
        }
        yield {
            name: stack.enter_context(Command(make_project(home / name, small_model, **sections), "run", "recipe.yaml"))
            for name, sections in recipes.items()
        }
        assert str(port) in (home / "port" / "recipe.yaml").read_text()


def newest_checkpoint(command: Command) -> str:
    """Name of the newest complete checkpoint."""
    return max(p.parent.name for p in (command.folder / "checkpoints").glob("*/trainer.json"))


def failed(command: Command) -> str:
    """The one line with which it failed; nothing is left of it."""
    said = command.wait(240)
    assert command.none_left()
    assert said.code == 1 and len(said.err.splitlines()) == 1, said
    came_to = summary(command.folder)
    assert came_to["status"] == "failed" and said.err == f"moe-asyncrl: {came_to['error']}\n"
    assert came_to["steps"] == 0
    return said.err


# The two that interrupt come first: what they wait for passes.


def test_an_interrupt_before_anything_is_ready(commands: dict[str, Command]) -> None:
    """Too early for the roles to have a say: they are stopped, and that is no failure."""
    command = commands["at once"]
    command.until("its first line", lambda: command.process.poll() or command.out)
    command.interrupt()
    said = command.wait(60)
    assert command.none_left() and said.code == 130 and said.err == "", said
    assert summary(command.folder)["status"] == "stopped"


def test_an_interrupt_while_the_engine_starts(commands: dict[str, Command]) -> None:
    """The trainer, which waits for the engine then, does not wait on."""
    command = commands["early"]
    log = command.folder / "logs" / "trainer-0.log"
    ready = "model and optimizer are there"
    command.until("the trainer waits", lambda: command.process.poll() or (log.exists() and ready in log.read_text()))
    command.interrupt()
    said = command.wait(60)
    assert command.none_left() and said.code == 130 and said.err == "", said
    assert summary(command.folder)["status"] == "stopped"
    assert newest_checkpoint(command) == "step-00000000"


def test_the_port_is_taken(commands: dict[str, Command]) -> None:
    line = failed(commands["port"])
    assert "engine-0" in line and "port" in line and "not free" in line


def test_an_engine_that_dies_at_its_start(commands: dict[str, Command]) -> None:
    """Its own last words are shown."""
    line = failed(commands["flag"])
    assert "engine-0" in line and "unrecognized arguments: --no-such-flag" in line


def test_supervised_learning_needs_no_engine(commands: dict[str, Command]) -> None:
    command = commands["sft"]
    said = command.wait(240)
    assert command.none_left() and said.code == 0 and said.err == "", said
    losses = [m["loss"] for m in metrics(command.folder, "step")]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0], losses
    assert {p.name for p in (command.folder / "logs").iterdir()} == {"buffer.log", "trainer-0.log"}
    assert "loss" in said.out and "reward" not in said.out
    assert summary(command.folder)["status"] == "ok"
    assert [p.name for p in (command.folder / "checkpoints").iterdir()] == ["step-00000020"]


def test_a_reward_that_always_fails(commands: dict[str, Command]) -> None:
    """The last failure is quoted, with the user's own line of code."""
    line = failed(commands["judge"])
    assert "the judge is down" in line and "rewards.py" in line and "24" in line
