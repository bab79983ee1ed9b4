"""The session's worker pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Workers for world sizes 1 to 4, started by the first call that needs them and killed at the end."""
    with WorkerPool(size=4) as workers:
        yield workers
