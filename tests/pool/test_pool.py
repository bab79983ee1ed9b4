"""The worker pool itself: results, failures with rank and traceback, deadlines, and no orphans."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from moe_asyncrl.models.layout import Layout
from tests.pool.pool import WorkerFailed, WorkerPool


@pytest.fixture(scope="module")
def own_pool() -> Iterator[WorkerPool]:
    """A pool of this file's own, since its workers are made to fail."""
    with WorkerPool(size=2) as workers:
        yield workers


def test_results_come_by_rank_and_workers_stay(own_pool: WorkerPool) -> None:
    first = own_pool.run("tests.pool.jobs:rank_and_sum", world_size=2, value=10)
    second = own_pool.run("tests.pool.jobs:rank_and_sum", layout=Layout(pp=2), value=1)
    alone = own_pool.run("tests.pool.jobs:rank_and_sum", value=5)
    assert [answer[:2] for answer in first + second + alone] == [(0, 21), (1, 21), (0, 3), (1, 3), (0, 5)]
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
    assert alone[0][2] == first[0][2]


def test_an_exception_names_rank_and_line_and_the_pool_goes_on(own_pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed) as caught:
        own_pool.run("tests.pool.jobs:raise_on", world_size=2, rank=1)
    text = str(caught.value)
    assert "raise_on on layout dp2: rank 1 failed" in text
    assert "ValueError: planted" in text
    assert "jobs.py" in text
    assert len(own_pool.run("tests.pool.jobs:rank_and_sum", world_size=2, value=0)) == 2


def test_a_rank_that_hangs_is_named_with_its_place_and_the_pool_starts_afresh(own_pool: WorkerPool) -> None:
    before = [pid for *_, pid in own_pool.run("tests.pool.jobs:rank_and_sum", world_size=2, value=0)]
    with pytest.raises(WorkerFailed, match=r"hang_on on layout dp2: rank 1 did not answer within 1 s") as caught:
        own_pool.run("tests.pool.jobs:hang_on", world_size=2, rank=1, timeout_s=1)
    assert "in hang_on" in str(caught.value)
    assert not any(psutil.pid_exists(pid) for pid in before)
    after = own_pool.run("tests.pool.jobs:rank_and_sum", world_size=2, value=0)
    assert len(after) == 2


def test_a_rank_that_dies_is_named(own_pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="rank 0 failed:\nthe process died"):
        own_pool.run("tests.pool.jobs:die_on", world_size=2, rank=0)


def test_a_layout_that_needs_more_workers_is_refused(own_pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="needs 4 workers, the pool has 2"):
        own_pool.run("tests.pool.jobs:rank_and_sum", layout=Layout(dp=4), value=0)


OWNER = """
from tests.pool.pool import WorkerPool
if __name__ == "__main__":
    pool = WorkerPool(size=2)
    print(*(pid for *_, pid in pool.run("tests.pool.jobs:rank_and_sum", world_size=2, value=0)), flush=True)
    try:
        pool.run("tests.pool.jobs:hang_on", world_size=2, rank=1)
    except BaseException:
        pass
"""


def test_no_worker_outlives_an_owner_that_is_killed() -> None:
    # A process of its own, since its killing is the test. One of its workers is busy at that moment.
    owner = subprocess.Popen([sys.executable, "-W", "ignore", "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    workers = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(workers) == 2
    family = psutil.Process(owner.pid).children(recursive=True)
    time.sleep(0.3)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
