"""Runs coroutines for code that is not asynchronous, such as the trainer's first rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BlockingLoop:
    """An event loop in a thread of its own. Clients used through it keep their connections from call to call.

    The caller may start a coroutine (`start`), do its own part of a collective, and then take the result.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="blocking-loop", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin at once; the result is taken with `Future.result`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine, or its exception. Deadlines are the coroutine's own."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Stop the loop. What still runs in it is cancelled."""
        if self._loop.is_closed():
            return

        async def cancel() -> None:
            rest = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self.run(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> BlockingLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
