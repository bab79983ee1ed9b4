"""Processes for a user's reward function: off the event loop, killed when they hang, started again when they die.

A batch goes to a worker in one frame and its answers come back one by one; the parent's clock is reset by each
answer. When it runs out or the process dies, the job that was being scored gets the verdict, and the rest goes to a
fresh process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.scoring.score import Score, ScoreJob, failed
from moe_asyncrl.scoring.worker import ASYNC_CONCURRENCY, LENGTH, Answer, Batch, Ready, pack

START_TIMEOUT_S = 120.0
ASYNC_GRACE_S = 2.0
MAX_BATCH = 64


class _Died(Exception):
    """The process ended, or wrote what no worker of ours writes."""


class RewardProcess:
    """One worker process, started again after it was killed."""

    def __init__(self, name: str, *, search: Sequence[str], timeout_s: float) -> None:
        self._name, self._search, self._timeout_s = name, tuple(search), timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._answers = msgspec.msgpack.Decoder(Answer)
        self.ready = Ready("", False, "")

    async def start(self) -> None:
        """Start the process and wait until the function is loaded. Raises UserError with the reason if it cannot be."""
        arguments = ["-P", "-m", "moe_asyncrl.scoring.worker", str(os.getpid()), self._name, *self._search]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.ready = msgspec.msgpack.decode(await self._frame(), type=Ready)
        except TimeoutError:
            await self.kill()
            raise DeadlineExceeded(
                f"reward.function: waited {START_TIMEOUT_S:g} s for {self._name!r} to be imported"
            ) from None
        except (_Died, msgspec.MsgspecError) as e:
            await self.kill()
            raise UserError(f"reward.function: {self._name!r}: {e} while it was imported") from None
        except BaseException:
            await self.kill()
            raise
        if self.ready.error:
            await self.kill()
            raise UserError(self.ready.error)

    async def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """Scores in the order of the jobs."""
        scores: dict[int, Score] = {}
        together = ASYNC_CONCURRENCY if self.ready.is_async else 1
        while todo := [i for i in range(len(jobs)) if i not in scores]:
            verdict = await self._pass(jobs, todo, together, scores)
            left = [i for i in todo if i not in scores]
            if verdict is None or not left:
                continue
            if together > 1 and len(left) > 1:
                together = 1  # any of them may be the one that blocked the process: one at a time tells
            else:
                scores[left[0]] = verdict
        return [scores[i] for i in range(len(jobs))]

    async def _pass(
        self, jobs: Sequence[ScoreJob], todo: Sequence[int], together: int, scores: dict[int, Score]
    ) -> Score | None:
        """Send the jobs `todo`, collect answers into `scores`; the verdict on what stopped it, None if all answered."""
        if self._process is None:
            await self.start()
        assert self._process is not None and self._process.stdin is not None
        patience = self._timeout_s + (ASYNC_GRACE_S if self.ready.is_async else 0.0)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience) as deadline:
                self._process.stdin.write(pack(Batch(self._timeout_s, together, [jobs[i] for i in todo])))
                for _ in todo:
                    answer = self._answers.decode(await self._frame())
                    scores[todo[answer.index]] = answer.score
                    deadline.reschedule(loop.time() + patience)
        except TimeoutError:
            await self.kill()
            return Score("timeout", {}, f"the reward function took longer than {self._timeout_s:g} s")
        except (_Died, OSError, msgspec.MsgspecError, IndexError) as e:
            await self.kill()
            return failed(f"the reward function's process was lost: {e}")
        except BaseException:  # cancelled: answers that nobody reads would be taken for the next batch's
            await self.kill()
            raise
        return None

    async def _frame(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        try:
            (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            return await self._process.stdout.readexactly(size)
        except asyncio.IncompleteReadError:
            status = await self._process.wait()
            raise _Died(
                f"it ended by signal {-status}" if status < 0 else f"it ended with exit status {status}"
            ) from None

    async def kill(self) -> None:
        """End the process and all that it started in its session. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.shield(asyncio.wait_for(process.wait(), 10.0))
        if process.stdin is not None:
            process.stdin.close()


class RewardPool:
    """`workers` processes that share the batches."""

    def __init__(self, processes: Sequence[RewardProcess]) -> None:
        self._all = tuple(processes)
        self._free: asyncio.Queue[RewardProcess] = asyncio.Queue()
        for process in processes:
            self._free.put_nowait(process)
        self.version = processes[0].ready.version

    @classmethod
    async def start(cls, name: str, *, search: Sequence[str], workers: int, timeout_s: float) -> RewardPool:
        """Start the processes. Raises UserError if the function cannot be found, imported or called."""
        processes = [RewardProcess(name, search=search, timeout_s=timeout_s) for _ in range(workers)]
        try:
            await processes[0].start()  # alone first: a broken module is reported once
            await asyncio.gather(*(p.start() for p in processes[1:]))
        except BaseException:
            await asyncio.gather(*(p.kill() for p in processes))
            raise
        return cls(processes)

    async def score(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        """Scores in the order of the jobs; every job gets one.

        Raises UserError if a process cannot be started again.
        """
        size = max(1, min(MAX_BATCH, -(-len(jobs) // len(self._all))))
        parts = await asyncio.gather(*(self._part(jobs[i : i + size]) for i in range(0, len(jobs), size)))
        return [score for part in parts for score in part]

    async def _part(self, jobs: Sequence[ScoreJob]) -> list[Score]:
        process = await self._free.get()
        try:
            return await process.score(jobs)
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(p.kill() for p in self._all))
