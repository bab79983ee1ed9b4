"""Launched runs as the tests see them: the command, the processes of a run, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.slurm.fixture import Cluster, wait_until
from tests.system.command import COMMAND

START_S = 240.0
"""Longest wait for something in a run on a busy machine."""


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


def write_cluster(path: Path, **fields: Any) -> Path:
    """A cluster file for the fixture."""
    fields = {"time_limit": "00:30:00", "stop_lead_s": 60, "network": {"gloo": "lo"}, **fields}
    path.write_text(yaml.safe_dump(fields))
    return path


def command(cluster: Cluster, cwd: Path, *arguments: str, limit_s: float = START_S, **variables: str) -> Said:
    """`moe-asyncrl` with its arguments, in the cluster's environment."""
    ended = subprocess.run(
        [str(COMMAND), *arguments],
        cwd=cwd,
        env={**cluster.environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return Said(ended.returncode, ended.stdout, ended.stderr)


def processes(folder: Path) -> list[psutil.Process]:
    """Living processes that name something below the folder in their command."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            named = any(str(folder) in word for word in process.cmdline())
            if named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
    return found


def none_left(folder: Path, cluster: Cluster, *, keep: Sequence[str] = ()) -> None:
    """Fails unless every process of the runs below the folder, and every job but `keep`, is gone soon."""

    def gone() -> bool:
        jobs = [line for line in cluster.jobs() if line.split()[0] not in keep]
        return not jobs and not processes(folder)

    wait_until("nothing is left", gone, 30, lambda: f"{cluster.jobs()} {[p.cmdline() for p in processes(folder)]}")


def story(folder: Path) -> str:
    """For the report of a failed test: the ends of the run's logs."""
    logs = sorted((folder / "logs").glob("*"))
    return "\n".join(
        f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:]) for log in logs
    )


class Run:
    """A run folder that jobs work on, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Steps in its metrics, in order."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [m["step"] for m in map(json.loads, lines) if m["kind"] == "step"]

    def checkpoint(self) -> int:
        """The step of the newest complete checkpoint; 0 without one."""
        return max(
            (int(p.parent.name.partition("-")[2]) for p in self.folder.glob("checkpoints/*/trainer.json")), default=0
        )

    def until(self, what: str, true: Any) -> None:
        """Wait, and tell the run's story if it does not happen."""
        wait_until(what, true, START_S, lambda: story(self.folder))

    def rank(self, number: int) -> psutil.Process | None:
        """The process of a trainer rank, told by what Slurm put into its environment."""
        for process in processes(self.folder):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[3:5] == ["role", "trainer"] and process.environ()["SLURM_PROCID"] == str(number):
                    return process
        return None

    def kill_rank(self, number: int) -> None:
        """What a crash of that process looks like."""
        rank = self.rank(number)
        assert rank is not None, story(self.folder)
        rank.kill()

    def json(self, name: str) -> Any:
        """A file of the run, or None."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None
