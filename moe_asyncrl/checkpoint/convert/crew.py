"""The worker processes of a conversion: units out, answers in, and one clear line when one of them cannot go on."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from moe_asyncrl.checkpoint.convert.program import Answer, Failed, Finished, Moved, Unit
from moe_asyncrl.data.errors import UserError

_STOP_S = 10.0
_MOST, _MOST_COMPUTING = 16, 6
"""A worker that moves or compares arrays has up to 150 MB, one with torch up to 450."""
_WORKER = "moe_asyncrl.checkpoint.convert.worker"


class WorkerError(UserError):
    """A worker could not do its unit. `number` is the operating system's error, 0 where there is none."""

    def __init__(self, text: str, number: int = 0) -> None:
        super().__init__(text)
        self.number = number


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    unit: int | None = None
    unread: bytearray = field(default_factory=bytearray)


def worker_count(asked: int | None, *, computes: bool = False) -> int:
    """Processes to use: as asked, else one for each core that this process may use, up to what fits into 3 GiB.

    `computes`: weights are quantised or dequantised, for which each process needs torch. Raises UserError below 1.
    """
    if asked is not None and asked < 1:
        raise UserError(f"--workers is {asked}; it must be at least 1")
    return asked or min(len(os.sched_getaffinity(0)), _MOST_COMPUTING if computes else _MOST)


def run_units(
    units: Iterable[Unit],
    workers: int,
    *,
    moved: Callable[[int], None],
    finished: Callable[[Finished], None],
) -> None:
    """Carry out all units, each by one of at most `workers` processes. All of them have ended when this returns.

    `moved` and `finished` are called here, in this process, as words come in.

    Raises:
        WorkerError: a worker failed or died; the others were stopped in the middle of what they did.
        UserError: so they were, because what a worker read is damaged.
    """
    waiting = deque(units)
    if not waiting:
        return
    crew = [_start() for _ in range(min(workers, len(waiting)))]
    try:
        with selectors.DefaultSelector() as selector:
            for number, worker in enumerate(crew):
                assert worker.process.stdout is not None
                os.set_blocking(worker.process.stdout.fileno(), False)
                selector.register(worker.process.stdout, selectors.EVENT_READ, (number, worker))
                _give(worker, waiting, number)
            while any(worker.unit is not None for worker in crew):
                for key, _ in selector.select():
                    number, worker = key.data
                    if not _listen(number, worker, waiting, moved, finished):
                        selector.unregister(key.fileobj)
        for worker in crew:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
            worker.process.wait(_STOP_S)
    finally:
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                if pipe is not None:
                    _close(pipe)


def _start() -> _Worker:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", _WORKER, str(os.getpid())]
    # A group of its own: Ctrl-C is for this process, also while the worker still imports.
    return _Worker(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    )


def _give(worker: _Worker, waiting: deque[Unit], number: int) -> None:
    """The next unit, if there is one."""
    worker.unit = None
    if not waiting:
        return
    unit = waiting.popleft()
    worker.unit = unit.number
    assert worker.process.stdin is not None
    try:
        worker.process.stdin.write(msgspec.json.encode(unit) + b"\n")
        worker.process.stdin.flush()
    except BrokenPipeError:
        raise _death(worker, number) from None


def _listen(
    number: int,
    worker: _Worker,
    waiting: deque[Unit],
    moved: Callable[[int], None],
    finished: Callable[[Finished], None],
) -> bool:
    """Take in what a worker says. False where it has ended with nothing left to do."""
    assert worker.process.stdout is not None
    found = os.read(worker.process.stdout.fileno(), 1 << 16)
    if not found:
        if worker.unit is None:
            return False
        raise _death(worker, number)
    worker.unread += found
    *lines, rest = bytes(worker.unread).split(b"\n")
    worker.unread = bytearray(rest)
    for line in lines:
        answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Moved):
            moved(answer.size)
        elif isinstance(answer, Failed):
            raise WorkerError(answer.text, answer.number) if answer.number else UserError(answer.text)
        else:
            finished(answer)
            _give(worker, waiting, number)
    return True


def _death(worker: _Worker, number: int) -> WorkerError:
    code = worker.process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return WorkerError(f"worker {number} (process {worker.process.pid}) {how} in the middle of its work")


def _close(pipe: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()  # type: ignore[attr-defined]
