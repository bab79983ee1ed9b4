"""`moe-asyncrl` as a child process of a test: what it said, what it started, what it left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

COMMAND = Path(sys.executable).with_name("moe-asyncrl")
TAG = "MOE_ASYNCRL_TEST"
"""Environment variable that every process of one command inherits."""
START_S = 240.0
"""Longest start of a run, engines included, on a busy machine."""
LOOK_S = 0.3


_prctl = ctypes.CDLL(None).prctl


def _die_with_parent() -> None:
    """In the child: a test session that is killed leaves no run behind (whose roles die with their supervisor)."""
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, signal.SIGKILL)


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """A running command, the leader of a session of its own. Use it as a context: it is killed with all it started."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self.cwd = cwd
        self._tag = uuid.uuid4().hex
        self._out, self._err = cwd / f".{self._tag}.out", cwd / f".{self._tag}.err"
        self._seen: dict[int, psutil.Process] = {}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(COMMAND), *arguments],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env={**os.environ, TAG: self._tag, "PYTHONPATH": ""},
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.processes()
            self.process.kill()
            self.process.wait(30)
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, limit_s: float) -> Said:
        """Until it ends. Fails after `limit_s` seconds with what it said so far."""
        end = time.monotonic() + limit_s
        while self.process.poll() is None:
            self.processes()
            assert time.monotonic() < end, f"no end within {limit_s:g} s\n{self.story()}"
            time.sleep(LOOK_S)
        return self.said()

    def until(self, what: str, true: Callable[[], Any], limit_s: float = START_S) -> Any:
        """What `true` returns once that is not false. Fails when the command ends first, or after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while True:
            found = true()
            if found:
                return found
            self.processes()
            assert self.process.poll() is None, f"it ended before {what}\n{self.story()}"
            assert time.monotonic() < end, f"not {what} within {limit_s:g} s\n{self.story()}"
            time.sleep(LOOK_S)

    def said(self) -> Said:
        """Exit code and all output of a command that has ended."""
        return Said(self.process.wait(0), self._out.read_text(), self._err.read_text())

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    def story(self) -> str:
        """For the report of a failed test: all that it printed, and the ends of its roles' logs."""
        parts = [self._out.read_text(), self._err.read_text()]
        for log in sorted((self.cwd / "runs" / "latest" / "logs").glob("*")):
            parts.append(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))
        return "\n".join(parts)

    # --- the run ---------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The newest run folder."""
        return (self.cwd / "runs" / "latest").resolve()

    def until_step(self, step: int, limit_s: float = START_S) -> None:
        """Until the run has done so many steps."""
        self.until(f"step {step}", lambda: [m for m in metrics(self.folder, "step") if m["step"] >= step], limit_s)

    def interrupt(self) -> None:
        """What Ctrl-C sends to the command."""
        self.process.send_signal(signal.SIGINT)

    # --- processes ---------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """The command's descendants now; they are remembered."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._seen.update({p.pid: p for p in found})
            return found
        return []

    def role(self, name: str) -> psutil.Process:
        """The process of one role, for example `trainer-1`."""
        kind, _, index = name.partition("-")
        wanted = ["role", kind]
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = process.cmdline()
                if wanted == line[3:5] and (not index or line[-2:] == ["--index", index]):
                    return process
        raise AssertionError(f"no process of {name}\n{self.story()}")

    def left(self) -> list[psutil.Process]:
        """Processes that the command started and that still live: seen before, in a session of theirs, or marked."""
        sessions = {self.process.pid, *self._seen}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == self.process.pid:
                    continue
                known = self._seen.get(process.pid)
                marked = process.environ().get(TAG) == self._tag
                if (known is not None and known == process) or os.getsid(process.pid) in sessions or marked:
                    found.append(process)
        return found

    def none_left(self, within_s: float = 10.0) -> bool:
        """True once nothing is left; the kernel needs a moment to bury a process."""
        end = time.monotonic() + within_s
        while self.left():
            if time.monotonic() > end:
                print("left behind:", self.left())
                return False
            time.sleep(LOOK_S)
        return True


def run_command(cwd: Path, *arguments: str, limit_s: float = START_S) -> Said:
    """A whole command. It leaves no process."""
    with Command(cwd, *arguments) as command:
        said = command.wait(limit_s)
        assert command.none_left()
    return said


def metrics(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Complete lines of a run's metrics, of one kind or all."""
    return [m for m in _lines(folder / "metrics.jsonl") if kind in (None, m["kind"])]


def events(folder: Path) -> list[dict[str, Any]]:
    """Complete lines of a run's events."""
    return _lines(folder / "events.jsonl")


def summary(folder: Path) -> dict[str, Any]:
    """What the run came to."""
    return json.loads((folder / "summary.json").read_text())


def error_lines(said: Said) -> Sequence[str]:
    """Lines on standard error."""
    return said.err.splitlines()


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
