"""Which checkpoint an export takes, also while its run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_asyncrl.cluster.export import ATTEMPTS, choose
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import folder_of, make_room
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.test_checkpoint import sealed

JOB = "tests.cluster.export_jobs:read_beside_a_run"


def test_any_complete_checkpoint_or_the_list_of_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(UserError, match="no complete checkpoint to export"):
        choose(run, None)
    with pytest.raises(UserError, match=r"no complete checkpoint of step 3; complete ones are of steps: none$"):
        choose(run, 3)
    for step in (20, 40, 60):
        sealed(run.checkpoints, step)
    make_room(run.checkpoints, 80)  # under way
    assert choose(run, None) == folder_of(run.checkpoints, 60)
    assert choose(run, 40) == folder_of(run.checkpoints, 40)
    with pytest.raises(UserError, match=r"no complete checkpoint of step 41; complete ones are of steps: 20, 40, 60$"):
        choose(run, 41)
    with pytest.raises(UserError, match=r"of step 80 \(.*trainer\.json cannot be read.*\); complete ones are of steps"):
        choose(run, 80)


def test_what_the_run_removes_meanwhile_is_never_read_by_half(pool: WorkerPool, tmp_path: Path) -> None:
    # 3 replaces 2 while 2 is read.
    assert pool.run(JOB, layout=Layout(), run=str(tmp_path / "a"), step=None, saves=1) == [["3"]]
    # Each one is replaced while it is read.
    with pytest.raises(WorkerFailed, match=r"step-00000004: removed by the run while it was read, as newer ones came"):
        pool.run(JOB, layout=Layout(), run=str(tmp_path / "b"), step=None, saves=ATTEMPTS)
    with pytest.raises(WorkerFailed, match=r"no complete checkpoint of step 1; complete ones are of steps: 3"):
        pool.run(JOB, layout=Layout(), run=str(tmp_path / "c"), step=1, saves=1)
