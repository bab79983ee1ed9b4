"""The peer as a process that trains a slice when it is asked to, and waits in between."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.pairs import Measured
from benchmarks.tasks import Task
from moe_asyncrl.data.errors import DeadlineExceeded, UserError

PROGRAM = Path(__file__).with_name("train.py")
THREADS = 2
MICRO_BATCH = {"short": 512, "long": 32}
"""Sequences in one forward and backward pass: what was fastest here, of 128 to 512 and of 8 to 64."""
START_S = 300.0
SLICE_S = 900.0
"""Longest time for one slice."""
END_S = 5.0


def settings(task: Task, *, model: Path, prompts: Path, output: Path, lr: float, seed: int) -> dict[str, Any]:
    """What `train.py` is told: the task as our side has it, and what suits the peer."""
    return {
        "model": str(model),
        "prompts": str(prompts),
        "output": str(output),
        "groups": task.groups,
        "group_size": task.group_size,
        "max_new_tokens": task.max_new_tokens,
        "lr": lr,
        "seed": seed,
        "threads": THREADS,
        "micro_batch": MICRO_BATCH[task.name],
        "experts": "grouped_mm",
    }


def environment() -> dict[str, str]:
    """The peer's environment variables: two threads that sleep while they wait, no network.

    Threads that spin at a barrier are a little faster on an idle machine and many times slower on a shared one.
    """
    return {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")},
        "OMP_NUM_THREADS": str(THREADS),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


class Peer:
    """Use with `with`: the process is gone afterwards, whatever happened."""

    def __init__(self, python: Path, told: dict[str, Any], folder: Path) -> None:
        """`told` as `settings` gives it; `folder` takes its settings and its log."""
        self._python, self._told, self._folder = python, told, folder
        self._log = folder / "peer.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Peer:
        path = self._folder / "peer.json"
        path.write_text(json.dumps(self._told))
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [str(self._python), str(PROGRAM), str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._folder,
                    env=environment(),
                )
            except OSError as error:
                raise UserError(f"the peer cannot be started: {error}; run `make setup-trl`") from None
        try:
            ready = self._answer(START_S, "to load")
            self.versions = {name: ready[name] for name in ("torch", "transformers", "trl")}
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._process is not None:
            self._process.kill()
        self.close()

    def train(self, steps: int, *, cap: int | None = None) -> tuple[Measured, dict[str, Any]]:
        """Train `steps` optimizer steps; what they came to, and the peer's own figures.

        `cap`: longest answer, in tokens.

        Raises DeadlineExceeded, or UserError with the peer's last words if it died.
        """
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"steps": steps, "cap": cap}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        found = self._answer(SLICE_S, f"to train {steps} steps")
        return Measured(int(found["tokens"]), int(found["steps"]), float(found["seconds"])), found

    def close(self) -> None:
        """End the process: it is asked by the end of its input, and killed if it is busy."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(END_S)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _answer(self, deadline_s: float, what: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise DeadlineExceeded(f"waited {deadline_s:g} s for the peer {what}; its log: {self._log}")
                block = os.read(self._process.stdout.fileno(), 65536)
                if not block:
                    raise self._died()
                self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> UserError:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else "it said nothing"
        return UserError(f"the peer ended by itself: {last}; to make its environment anew, remove .venv-trl")
