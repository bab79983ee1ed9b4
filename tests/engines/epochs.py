"""Epochs for tests that share engines: an engine refuses what is older than the newest that it has seen."""

from __future__ import annotations

import time


def next_epoch() -> int:
    """Above every earlier one of this machine, whichever process took it."""
    return time.monotonic_ns() // 1_000_000
