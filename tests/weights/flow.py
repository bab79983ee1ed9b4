"""A steady flow of requests to some engines, of mixed lengths and with shared beginnings, from a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from tests.engines.fixtures import TestEngine

NUMBERS = itertools.count()
PREFIXES = (24, 48, 90)
"""Lengths of the beginnings that prompts share."""
LENGTHS = (3, 10, 10, 40, 100)
"""Of replies."""
STALE = 3
"""A version that engines leave behind early: clients that name it ask for old prefixes."""


@dataclass(frozen=True)
class Reply:
    """One request and its completion."""

    engine: str
    prompt: tuple[int, ...]
    done: Completion
    began: float
    ended: float
    """Unix time, by the client's clock"""


@dataclass(frozen=True)
class Failure:
    """A request that was answered with an error."""

    engine: str
    text: str
    began: float
    ended: float


class Flow:
    """Use as a context manager; what came is in `replies` and `failures`. Raises at its end what broke it."""

    def __init__(
        self,
        engines: Sequence[TestEngine],
        *,
        slots: int,
        seed: int = 0,
        lengths: Sequence[int] = LENGTHS,
        deadline_s: float = 120.0,
    ) -> None:
        """`slots`: requests under way on each engine at any time."""
        self._engines = tuple(engines)
        self._slots, self._seed, self._lengths, self._deadline_s = slots, seed, tuple(lengths), deadline_s
        rng = np.random.default_rng(seed)
        self._prefixes = [rng.integers(4, 500, size=n).tolist() for n in PREFIXES]
        self.replies: list[Reply] = []
        self.failures: list[Failure] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow")
        self._broken: BaseException | None = None

    def __enter__(self) -> Flow:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._broken is not None and error is None:
            raise self._broken

    def wait(self, done: Callable[[Flow], bool], limit_s: float, what: str) -> None:
        """Until enough came."""
        end = time.monotonic() + limit_s
        while not done(self):
            assert self._thread.is_alive() and time.monotonic() < end, f"waited {limit_s:g} s for {what}"
            time.sleep(0.02)

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:
            self._broken = error

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, engine in enumerate(self._engines):
                tasks.create_task(self._one(engine, number))

    async def _one(self, engine: TestEngine, number: int) -> None:
        async with engine.client() as client, asyncio.TaskGroup() as tasks:
            for slot in range(self._slots):
                tasks.create_task(self._slot(engine.name, client, np.random.default_rng([self._seed, number, slot])))

    async def _slot(self, name: str, client: EngineClient, rng: np.random.Generator) -> None:
        while not self._over.is_set():
            prefix = self._prefixes[int(rng.integers(len(self._prefixes)))]
            prompt = (*prefix, *rng.integers(4, 500, size=int(rng.integers(0, 6))).tolist())
            request = GenerateRequest(
                rid=f"flow-{next(NUMBERS)}",
                input_ids=list(prompt),
                sampling=SamplingParams(temperature=1.0, max_new_tokens=int(rng.choice(self._lengths))),
                version=STALE,
                ignore_eos=True,
            )
            began = time.time()
            try:
                (done,) = await client.generate([request], deadline_s=self._deadline_s)
            except UserError as error:
                self.failures.append(Failure(name, str(error), began, time.time()))
                await asyncio.sleep(0.2)
                continue
            self.replies.append(Reply(name, prompt, done, began, time.time()))
