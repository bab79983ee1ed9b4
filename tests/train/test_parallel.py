"""Meeting the other ranks: what is missing or late is one clear error."""

from __future__ import annotations

import time

import pytest

from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.parallel import ParallelRuntime
from tests.pool.pool import WorkerFailed, WorkerPool

MEETING = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("name", MEETING)
def test_a_missing_variable_is_named(name: str) -> None:
    environment = {key: value for key, value in MEETING.items() if key != name}
    with pytest.raises(UserError, match=f"{name} is not set"):
        ParallelRuntime.from_environment(Capabilities(), environment)


def test_a_variable_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="must be numbers"):
        ParallelRuntime.from_environment(Capabilities(), MEETING | {"RANK": "first"})


def test_ranks_that_never_come_end_the_wait() -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"rank 0: 2 ranks did not meet at 127.0.0.1:\d+ in 1 s"):
        environment = MEETING | {"RANK": "0", "MASTER_PORT": str(free_port())}
        ParallelRuntime.from_environment(Capabilities(), environment, timeout_s=1)
    assert time.monotonic() - start < 20


def test_groups_that_are_not_formed_in_time_are_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"the process groups of layout ep2xdp2 were not formed within 1 s"):
        pool.run("tests.train.layout_jobs:form_groups_alone", timeout_s=30)


def test_a_layout_of_another_size_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match="layout pp4 needs 4 ranks, there are 2"):
        pool.run("tests.train.layout_jobs:form_groups_alone", other=Layout(pp=4))
