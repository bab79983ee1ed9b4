"""A pool of resident worker processes for tests that need several ranks.

Starting a process with PyTorch and Megatron-Core takes seconds, so the workers live as long as the test session. They
are forked from a server process that has both imported (`tests.pool.preload`), on the first call that needs them.
A pool of 4 serves world sizes 1 to 4: a call runs on the first `layout.world_size` workers, which form the process
groups of another layout when it changes.

Results travel over pipes between a test and its own children, by Python's multiprocessing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import connection
from pathlib import Path
from typing import Any

from moe_asyncrl.models.layout import Layout
from tests.pool.pipes import receive, send
from tests.pool.worker import Answer, Call, serve

GRACE_S = 3.0
"""After one rank raised: how long the others may take to come out of what they are in."""
STACK_LINES = 12


class WorkerFailed(Exception):
    """A worker raised, died or did not answer in time. The message names ranks and shows their tracebacks."""


class WorkerPool:
    """Up to `size` workers. Use as a context manager, or call `close`."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[tuple[Any, connection.Connection]] = []
        self._meetings = itertools.count()
        self._groups: dict[int, str] = {}
        self._store: Any = None
        self._resources = ExitStack()
        self._logs = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="pool-")))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        target: str,
        *,
        layout: Layout | None = None,
        world_size: int | None = None,
        timeout_s: float = 60.0,
        seed: int = 1234,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `target` (`package.module:function`) with `kwargs` on every rank of `layout`; the results by rank.

        A function with a parameter named `layout` gets the layout too.

        Without a layout: `world_size` ranks of plain data parallelism, 1 if that is not given either. The parallel
        state is that of the layout, and the generators are seeded with `seed`, before the function starts.

        Raises:
            WorkerFailed: a worker raised (the others get a few seconds, then the pool starts afresh), or not all
                answered within `timeout_s` (the pool starts afresh; the message shows where each one stood).
        """
        layout = layout or Layout(dp=world_size or 1)
        count = layout.world_size
        if count > self.size:
            raise ValueError(f"layout {layout} needs {count} workers, the pool has {self.size}")
        if world_size not in (None, count):
            raise ValueError(f"layout {layout} needs {count} workers, world_size is {world_size}")
        self._start(count)
        # Workers of another world size may hold a worker's groups from earlier: only the same set may go on with them.
        meeting = self._groups.get(count) or f"meeting-{next(self._meetings)}"
        self._groups = {count: meeting}
        for rank in range(count):
            call = Call(
                target=target,
                kwargs=kwargs,
                rank=rank,
                world_size=count,
                store=("127.0.0.1", self._store.port),
                meeting=meeting,
                layout=layout,
                seed=seed,
                timeout_s=timeout_s,
            )
            send(self._workers[rank][1], call)
        return self._collect(target, layout, timeout_s)

    def _collect(self, target: str, layout: Layout, timeout_s: float) -> list[Any]:
        answers: dict[int, Answer] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[: layout.world_size])}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = receive(self._workers[rank][1])
                except (EOFError, OSError):
                    answers[rank] = Answer(error=f"the process died\n{self._log_tail(rank)}")
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = {rank: answer.error for rank, answer in sorted(answers.items()) if answer.error}
        if not waiting and not failures:
            return [answers[rank].result for rank in range(layout.world_size)]
        parts = [f"{target} on layout {layout}: rank {rank} failed:\n{error}" for rank, error in failures.items()]
        for rank in sorted(waiting.values()):
            late = "after another rank failed" if failures else f"within {timeout_s:g} s"
            parts.append(f"{target} on layout {layout}: rank {rank} did not answer {late}; it stood at:\n")
            parts[-1] += self._stack(rank)
        self._groups = {}
        if waiting or any("the process died" in error for error in failures.values()):
            self._kill()
        raise WorkerFailed("\n".join(parts))

    def _start(self, count: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if len(self._workers) >= count:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.pool.preload"])
        for rank in range(len(self._workers), count):
            ours, theirs = context.Pipe()
            log = str(self._logs / f"rank{rank}.log")
            process = context.Process(target=serve, args=(theirs, log, os.getpid()), daemon=True)
            _with_environment({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, process.start)
            theirs.close()
            self._workers.append((process, ours))

    def _stack(self, rank: int) -> str:
        process, _ = self._workers[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._log_tail(rank)

    def _log_tail(self, rank: int) -> str:
        log = self._logs / f"rank{rank}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        return "\n".join(text.splitlines()[-STACK_LINES:])

    def _kill(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join(5)
        self._workers = []
        self._groups = {}

    def close(self) -> None:
        """Kill the workers and remove their logs."""
        self._kill()
        self._store = None
        self._resources.close()


def _with_environment(values: dict[str, str], do: Callable[[], object]) -> None:
    """Do something with environment variables set: the fork server inherits those of the moment it starts at."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        do()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
