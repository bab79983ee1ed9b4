"""One role as a child process: its own session and log, stopped whole, its last words kept."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from moe_asyncrl.telemetry.run_folder import RunFolder

if TYPE_CHECKING:
    from moe_asyncrl.cluster.launcher import Role


@dataclasses.dataclass
class RoleProcess:
    """A running (or ended) role."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    error_file: Path
    node: str = ""
    asked: bool = False
    """It was asked to stop."""
    _family: list[psutil.Process] = dataclasses.field(default_factory=list)
    """Descendants when it was asked to stop: what it forgets is ended too."""

    @property
    def own_word(self) -> bool:
        """It left a line that says why it failed."""
        return self.error_file.exists()

    def ask_to_stop(self) -> None:
        """SIGTERM. Nothing happens if it has ended."""
        if self.exit_code is None:
            self.asked = True
            self._family = _descendants(self.process.pid)
            _signal(self.process.pid, signal.SIGTERM)

    def end(self) -> None:
        """SIGKILL, if it still runs, and for all of its descendants that are left."""
        if self.exit_code is None:
            self.process.kill()
            self.process.wait(timeout=30)
        for child in self._family:
            if child.is_running():
                _signal(child.pid, signal.SIGKILL)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def error(self) -> str:
        """Why it ended, in one line: its own last word if it left one, else how it ended and its last log line."""
        if self.error_file.exists():
            text = self.error_file.read_text(encoding="utf-8").strip()
            return text if text.startswith(f"{self.name}:") else f"{self.name}: {text}"
        code = self.exit_code
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        # Who is killed from outside does not know why: its last line would mislead.
        last = "" if code in (-signal.SIGKILL, -signal.SIGTERM) else last_line(self.log)
        return f"{self.name} {how}; see {self.log}" + (f" (last line: {last})" if last else "")


def last_line(path: Path, limit: int = 200) -> str:
    """The last line of a log that says something, cut to `limit` characters."""
    if not path.exists():
        return ""
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - 8192))
        lines = [line.strip() for line in f.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:limit] if lines else ""


def start_role(
    folder: RunFolder,
    role: str,
    index: int | None = None,
    *,
    gpus: str | None = None,
    extra_env: dict[str, str] | None = None,
) -> RoleProcess:
    """Start `moe-asyncrl role ROLE` for the run, tied to this process's life. `gpus` as `role --gpus` reads them."""
    name = role if index is None else f"{role}-{index}"
    log = folder.log_path(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "moe_asyncrl.cli", "role", role, "--run", str(folder.path)]
    command += ["--parent", str(os.getpid())]
    if index is not None:
        command += ["--index", str(index)]
    if gpus is not None:
        command[-2:-2] = ["--gpus", gpus]
    process = spawn(command, log, {**os.environ, **(extra_env or {})})
    return RoleProcess(name, process, log, error_file(folder, name))


def spawn(command: Sequence[str], said: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A child in a session of its own. What it says is added to a file."""
    with said.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def error_file(folder: RunFolder, name: str) -> Path:
    """Where a role leaves the one line that says why it failed."""
    return folder.logs / f"{name}.error"


def stop_roles(roles: Sequence[Role], *, grace_s: float) -> None:
    """SIGTERM, up to `grace_s` for all of them together, then the end for what is left and all that it started."""
    for r in roles:
        r.ask_to_stop()
    wait_all(roles, grace_s)
    for r in roles:
        r.end()


def wait_all(roles: Sequence[Role], deadline_s: float) -> bool:
    """True if all ended in time."""
    deadline = time.monotonic() + deadline_s
    while any(r.exit_code is None for r in roles):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
