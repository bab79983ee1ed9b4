"""How long to wait for an answer, and when to ask again."""

from __future__ import annotations

import time

from moe_asyncrl.data.errors import DeadlineExceeded
from moe_asyncrl.data.messages import Request


class Patience:
    """The waits of one request: `resend_s` seconds, then twice as long each time, until `deadline_s` has passed."""

    def __init__(self, deadline_s: float, resend_s: float) -> None:
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._wait = resend_s

    def next_wait(self) -> float | None:
        """Seconds to wait now; None when the deadline has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            return None
        wait = min(self._wait, left)
        self._wait *= 2
        return wait

    def exceeded(self, request: Request, address: str) -> DeadlineExceeded:
        """The error that says what was waited for."""
        return DeadlineExceeded(
            f"{request.sender} waited {self._deadline_s:g} s for the buffer at {address} to answer "
            f"{type(request).__name__} (is its process alive, and are these the run's keys?)"
        )
