"""Requests that live through an update, and the pause as they see it: when their tokens arrived."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import threading
import time
from dataclasses import dataclass

import aiohttp

TOKENS = 2000
"""More than any request gets to sample while it is watched."""


@dataclass(frozen=True)
class Seen:
    """What requests saw, in seconds."""

    longest: float
    """Between two tokens of one request, the longest anywhere."""
    usual: float
    """The median of all others."""


class InFlight:
    """`count` streamed requests on a thread of their own, from `start` to `stop`."""

    def __init__(self, url: str, key: str, *, count: int) -> None:
        self._url, self._key, self._count = url, key, count
        self._arrivals: list[list[float]] = [[] for _ in range(count)]
        self._watched = [0] * count
        """Tokens before this one of each request came while others were still beginning."""
        self._enough = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)

    def start(self, deadline_s: float = 60.0) -> None:
        """Returns when every request has sampled a few tokens. Raises RuntimeError if they do not."""
        self._thread.start()
        end = time.monotonic() + deadline_s
        while not all(len(times) > 3 for times in self._arrivals):
            if time.monotonic() > end or self._error is not None:
                raise RuntimeError(f"the requests did not come to sample within {deadline_s:g} s: {self._error}")
            time.sleep(0.05)
        self._watched = [len(times) - 1 for times in self._arrivals]

    def stop(self, more: int = 3) -> Seen:
        """Wait for `more` tokens of each, end the requests, and say what they saw."""
        wanted = [len(times) + more for times in self._arrivals]
        end = time.monotonic() + 60
        while any(len(times) < n for times, n in zip(self._arrivals, wanted, strict=True)):
            if time.monotonic() > end or self._error is not None:
                raise RuntimeError(f"the requests did not go on after the update: {self._error}")
            time.sleep(0.02)
        self._enough.set()
        self._thread.join(30)
        seen = [times[first:] for times, first in zip(self._arrivals, self._watched, strict=True)]
        gaps = sorted(b - a for times in seen for a, b in itertools.pairwise(times))
        return Seen(longest=gaps[-1], usual=statistics.median(gaps[: -self._count]))

    def _run(self) -> None:
        try:
            asyncio.run(self._stream_all())
        except Exception as error:
            self._error = error

    async def _stream_all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}, timeout=timeout) as session:
            tasks = [asyncio.create_task(self._stream(session, number)) for number in range(self._count)]
            while not self._enough.is_set() and not any(task.done() for task in tasks):
                await asyncio.sleep(0.02)
            for task in tasks:
                if task.done() and not self._enough.is_set():
                    task.result()
                    raise RuntimeError("a request ended by itself")
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "input_ids": list(range(300 + number, 340 + number)),
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True},
            "stream": True,
        }
        async with session.post(f"{self._url}/generate", json=body) as reply:
            async for line in reply.content:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                found = json.loads(line[5:])
                if "error" in found:
                    raise RuntimeError(str(found["error"])[:300])
                self._arrivals[number].append(time.perf_counter())
