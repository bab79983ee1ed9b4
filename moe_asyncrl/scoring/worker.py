"""The process that runs a user's reward function: `python -m moe_asyncrl.scoring.worker NAME FOLDER…`.

Frames (a little-endian uint32 length, then msgpack) arrive on standard input and leave on the descriptor that was
standard output; what the function prints goes to standard error. It first sends `Ready`, then answers each `Batch`
with one `Answer` for each job. A synchronous function runs the jobs in order, so the first one without an answer is
the one that hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.scoring.score import Score, ScoreJob, failed, score_from
from moe_asyncrl.scoring.user import load

PR_SET_PDEATHSIG = 1
LENGTH = struct.Struct("<I")
ASYNC_CONCURRENCY = 64


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """The function is loaded, or why not."""

    error: str
    is_async: bool
    version: str


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Jobs to score. `timeout_s` bounds each await of an async function; a sync one is bounded by the parent alone."""

    timeout_s: float
    concurrency: int
    jobs: list[ScoreJob]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The score of job `index` of the batch."""

    index: int
    score: Score


def pack(message: msgspec.Struct) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def _send(sink: BinaryIO, message: msgspec.Struct) -> None:
    # Each answer leaves at once: the parent's clock for the next job starts with it.
    sink.write(pack(message))
    sink.flush()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of standard input and output; the function gets an empty input and standard error instead."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return source, sink


def _read(source: BinaryIO) -> Batch | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    return msgspec.msgpack.decode(source.read(size), type=Batch)


def reason(error: BaseException) -> str:
    """What an exception says, and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"the reward function raised {type(error).__name__}: {error}{where}"


def score_sync(function: Callable[..., Any], job: ScoreJob) -> Score:
    """One call."""
    try:
        return score_from(function(job.prompt, job.completion, job.answer, job.metadata))
    except Exception as e:
        return failed(reason(e))


async def score_async(function: Callable[..., Any], job: ScoreJob, timeout_s: float) -> Score:
    """One awaited call."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return score_from(await function(job.prompt, job.completion, job.answer, job.metadata))
    except TimeoutError as e:
        if deadline.expired():
            return Score("timeout", {}, f"the reward function took longer than {timeout_s:g} s")
        return failed(reason(e))
    except Exception as e:
        return failed(reason(e))


async def _run_async(function: Callable[..., Any], batch: Batch, sink: BinaryIO) -> None:
    slots = asyncio.Semaphore(batch.concurrency)

    async def one(index: int, job: ScoreJob) -> None:
        async with slots:
            _send(sink, Answer(index, await score_async(function, job, batch.timeout_s)))

    await asyncio.gather(*(one(i, job) for i, job in enumerate(batch.jobs)))


def main(argv: list[str]) -> int:
    """Serve until standard input ends."""
    _die_with(int(argv[0]))
    source, sink = _own_streams()
    try:
        function, is_async, version = load(argv[1], argv[2:])
    except UserError as e:
        _send(sink, Ready(str(e), False, ""))
        return 1
    _send(sink, Ready("", is_async, version))
    with asyncio.Runner() as runner:  # one event loop for the process's life: async functions keep their sessions
        while (batch := _read(source)) is not None:
            if is_async:
                runner.run(_run_async(function, batch, sink))
            else:
                for i, job in enumerate(batch.jobs):
                    _send(sink, Answer(i, score_sync(function, job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
