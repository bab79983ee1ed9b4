"""A sign that the first rank puts up to end a transfer: ranks that wait for engines look at it.

A rank that waits for a send to end cannot hear of an engine's refusal, which comes to the first rank. The sign is a key
in a store on the first rank; every transfer has a key of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_c10d: Any = dist
CONNECT_S = 60.0


class StopSign:
    """One on each rank. The first one serves the store and alone can `put_up`."""

    def __init__(self, host: str, port: int | None, timeout_s: float = CONNECT_S) -> None:
        """`port`: of the first rank's store; None on the first rank, which makes it."""
        limit = timedelta(seconds=timeout_s)
        self.first = port is None
        """This rank puts it up, so that looking costs nothing."""
        self._store: Any = _c10d.TCPStore(host, port or 0, None, self.first, limit, wait_for_workers=False)
        self._guard = threading.Lock()
        self._up: set[str] = set()
        self.port = int(self._store.port)

    def put_up(self, transfer: str) -> None:
        """End a transfer. For any thread of the first rank."""
        with self._guard:
            if transfer not in self._up:
                self._up = {transfer}
                self._store.set(f"stop/{transfer}", "1")

    def seen(self, transfer: str) -> bool:
        """Whether the sign is up; asks the first rank over the network unless this is it."""
        if self.first:
            return transfer in self._up
        with contextlib.suppress(RuntimeError, dist.DistError):
            return bool(self._store.check([f"stop/{transfer}"]))
        return True  # the first rank is gone

    def of(self, transfer: str) -> Callable[[], bool]:
        """`seen` for one transfer."""
        return lambda: self.seen(transfer)

    def take_down(self, transfer: str) -> None:
        """Forget a transfer that is over. For the first rank."""
        with self._guard:
            if transfer in self._up:
                self._up = set()
                self._store.delete_key(f"stop/{transfer}")

    def close(self) -> None:
        """Drop the connection, and on the first rank the store."""
        self._store = None
