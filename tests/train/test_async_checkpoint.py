"""A checkpoint written while training goes on: that of its step, and until it is complete the one before counts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.checkpoint_folder import folder_of, newest_complete, read_info
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.test_checkpoint import JOB, TOLERANCE, worst
from tests.train.test_family_gradients import FAMILIES

JOBS = "tests.train.async_checkpoint_jobs"
EP2 = Layout(dp=2, ep=2)


def shards(folder: str) -> dict[str, bytes]:
    """Every byte of weights and moments."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.distcp"))}


def test_it_holds_the_step_it_names_though_training_went_on(pool: WorkerPool, tmp_path: Path) -> None:
    spec = FAMILIES["glm4_moe"]
    answers = pool.run(f"{JOBS}:both_ways", layout=EP2, spec=spec, root=str(tmp_path / "real"))
    at_once, later = answers[0]["folders"]
    assert not any(a["early"] for a in answers), "it was under way while the steps were trained"
    assert shards(later) == shards(at_once) and shards(at_once)
    info = read_info(Path(later))
    assert info.files.keys() == read_info(Path(at_once)).files.keys() and info.step == info.adam_steps == 2
    size = sum(len(content) for content in shards(later).values())
    assert sum(a["bytes"] for a in answers) == pytest.approx(size, rel=0.01), "one copy of what is written"
    resumed = pool.run(JOB, layout=Layout(), steps=(2,), resume=later, spec=spec)
    assert resumed[0]["log"][0] == pytest.approx(answers[0]["log"][2], rel=TOLERANCE)

    planted = pool.run(f"{JOBS}:both_ways", layout=EP2, spec=spec, root=str(tmp_path / "planted"), alias=True)
    at_once, later = planted[0]["folders"]
    assert shards(later) != shards(at_once), "a tensor that is not copied would be seen"


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=4, ep=2), Layout(pp=2, dp=2)], ids=str)
def test_the_optimizer_is_gathered_where_it_is_written(pool: WorkerPool, layout: Layout) -> None:
    """Bit for bit what Megatron-Core's gather brings, on the first rank of each group; the others have nothing."""
    receivers = 0
    for answer in pool.run(f"{JOBS}:gathers", layout=layout, changes={}):
        assert {key for key, _, _ in answer} == {"param", "exp_avg", "exp_avg_sq"}
        assert all(same for _, receives, same in answer if receives)
        assert not all(same for _, receives, same in answer if not receives) or all(r for _, r, _ in answer)
        receivers += any(receives for _, receives, _ in answer)
    assert receivers == layout.pp * layout.ep


@pytest.mark.parametrize(
    ("moment", "rank", "left"),
    [
        ("copied", 1, 2),
        ("half a file", 1, 2),
        ("files written", 1, 2),
        ("before the side file", 0, 2),
        ("older one half removed", 0, 3),
    ],
)
def test_a_killed_rank_leaves_the_newest_complete_one(
    pool: WorkerPool, tmp_path: Path, moment: str, rank: int, left: int
) -> None:
    with pytest.raises(WorkerFailed, match=f"rank {rank} failed:\nthe process died"):
        pool.run(f"{JOBS}:killed", layout=EP2, root=str(tmp_path), moment=moment, rank=rank)
    found = newest_complete(tmp_path)
    assert found is not None and found[1].step == left
    whole = pool.run(JOB, layout=EP2, steps=tuple(range(left + 1)))
    resumed = pool.run(JOB, layout=EP2, steps=(left,), resume=str(found[0]))
    assert worst(resumed, whole) < TOLERANCE


def test_a_full_disk_is_one_line_on_every_rank_at_the_next_look(pool: WorkerPool, tmp_path: Path) -> None:
    for rank in (0, 1):
        root = tmp_path / str(rank)
        with pytest.raises(WorkerFailed) as caught:
            pool.run(f"{JOBS}:full_disk", layout=EP2, root=str(root), rank=rank)
        said = [line for line in str(caught.value).splitlines() if "UserError: " in line]
        folder = folder_of(root, 3)
        line = f"{folder}: rank {rank} could not write the checkpoint of step 3: [Errno 28] No space left on device"
        assert [s.partition("UserError: ")[2] for s in said] == [line, line]
        with pytest.raises(UserError, match="not a complete checkpoint"):
            read_info(folder)
        found = newest_complete(root)
        assert found is not None and found[1].step == 1


def test_a_disk_that_takes_nothing_is_not_waited_for_for_ever(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 could not write the checkpoint of step 1: nothing was written for"):
        pool.run(f"{JOBS}:stalled", layout=EP2, root=str(tmp_path))
    assert newest_complete(tmp_path) is None


WRITER = """
import sys
from pathlib import Path
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo, expired, make_room, remove, seal
root = Path(sys.argv[1])
rest = dict(cursor=Cursor(), counters=Counters(), seed=0, recipe_digest="", layout="", model="")
for step in range(int(sys.argv[2]), 10**6):
    folder = make_room(root, step)
    (folder / "shard").write_bytes(b"x" * 10000)
    seal(folder, CheckpointInfo(step=step, version=step, adam_steps=step, **rest))
    print(step, flush=True)
    for old in expired(root, 1):
        remove(old)
"""


def test_at_whatever_moment_it_is_killed_one_can_be_read(tmp_path: Path) -> None:
    draw = random.Random(0)
    step = 1
    for _ in range(12):
        # A process of its own, as it is to be killed anywhere.
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        said = [int(process.stdout.readline())]
        time.sleep(draw.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        said += [int(line) for line in process.stdout.read().splitlines()]
        process.wait(10)
        found = newest_complete(tmp_path)
        assert found is not None and found[1].step in (said[-1], said[-1] + 1)
        step = found[1].step + 1
