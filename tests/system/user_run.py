"""One whole run of a user's project, watched while it runs; several modules look at what it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.system.command import Command, Said
from tests.system.onlooker import Onlooker
from tests.system.projects import make_project, sums, write_lines

STEPS = 5


@dataclass(frozen=True)
class Done:
    """A finished run."""

    home: Path
    """The user's folder."""
    said: Said
    seen: Onlooker
    """What was seen of it while it ran."""

    @property
    def folder(self) -> Path:
        return self.home / "runs" / "latest"


def user_run(path: Path) -> Done:
    """The run. Nothing that it started is left."""
    home = make_project(
        path,
        run={"steps": STEPS},
        data={"eval": "held-out.jsonl"},
        reward={"function": "rewards:by_metadata", "timeout_s": 1.0},
        replay={"probe_every": 2},
        # A mask that is lost, or taken for the whole vocabulary, moves a log-probability by a tenth of a nat.
        rollout={"top_p": 0.9},
        algorithm={"kl_coef": 0.01},
        telemetry={"prometheus": True},
    )
    write_lines(home / "held-out.jsonl", sums(12, first=100))
    with Command(home, "run", "recipe.yaml") as command:
        command.until("a run folder", lambda: (command.folder / "recipe.yaml").exists())
        seen = Onlooker(command.folder)
        try:
            said = command.wait(270)
        finally:
            seen.close(30)
        assert command.none_left()
    return Done(home, said, seen)
