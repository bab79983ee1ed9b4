"""Save and resume: exact on any layout, and a half-written checkpoint is never taken for a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train import checkpoint_folder as folders
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation
from tests.train.test_family_gradients import FAMILIES

TOLERANCE = 1e-6
JOB = "tests.train.checkpoint_jobs:train"
EP2, EP2PP2 = Layout(dp=2, ep=2), Layout(pp=2, dp=2, ep=2)
# The first of two stages has no MoE layer at all: ranks have different optimizers.
UNEVEN_EP2PP2 = Layout(pp=2, dp=2, ep=2, stage_layers=(1, 3))
UNEVEN = {"moe_layers": (False, False, True, True)}


def worst(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """Largest deviation between the last steps' figures and the weights after them."""
    x, y = assemble([r["weights"] for r in a]), assemble([r["weights"] for r in b])
    figures = max(abs(p - q) / abs(q) for p, q in zip(a[0]["log"][-1], b[0]["log"][-1], strict=True))
    return max(figures, deviation(x, y))


@pytest.mark.parametrize(
    ("layout", "others", "changes"),
    [
        (EP2PP2, (EP2PP2, Layout(), EP2, Layout(tp=2, ep=2)), {}),
        (Layout(), (EP2, Layout(pp=2, vpp=2)), {}),
        (Layout(pp=2, vpp=2), (Layout(tp=2, ep=2),), {}),
        (Layout(pp=2), (Layout(),), UNEVEN),
        (UNEVEN_EP2PP2, (EP2PP2,), {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_step_after_a_resume_is_that_of_the_uninterrupted_run(
    pool: WorkerPool, tmp_path: Path, layout: Layout, others: tuple[Layout, ...], changes: dict[str, Any]
) -> None:
    whole = pool.run(JOB, layout=layout, steps=(0, 1), save=str(tmp_path), then=(2,), changes=changes)
    for other in others:
        resumed = pool.run(JOB, layout=other, steps=(2,), resume=whole[0]["folder"], changes=changes)
        assert worst(resumed, whole) < TOLERANCE, other
        info = resumed[0]["info"]
        assert (info.step, info.version, info.adam_steps) == (2, 2, 2)
        assert info.cursor == Cursor(watermark=6, done=(11,))
        assert info.counters == Counters(sampled=20, trained=16)
    lost = pool.run(JOB, layout=layout, steps=(2,), resume=whole[0]["folder"], changes=changes, wrong_adam_steps=True)
    assert worst(lost, whole) > 100 * TOLERANCE, "an optimizer that starts anew would be seen"


def test_from_layout_to_layout_nothing_is_lost(pool: WorkerPool, tmp_path: Path) -> None:
    """Fault 22 among others: each life on another layout, with a step in each, against a life that never changed."""
    whole = pool.run(JOB, layout=EP2PP2, steps=(0, 1), save=str(tmp_path / "a"), then=(2, 3))
    single = pool.run(JOB, layout=Layout(), steps=(2,), resume=whole[0]["folder"], save=str(tmp_path / "b"), done=3)
    last = pool.run(JOB, layout=Layout(tp=2, ep=2), steps=(3,), resume=single[0]["folder"])
    assert last[0]["info"].step == last[0]["info"].adam_steps == 3
    assert worst(last, whole) < 1e-5
    # Planted: an optimizer that starts anew.
    mixed = pool.run(JOB, layout=Layout(tp=2, ep=2), steps=(3,), resume=single[0]["folder"], wrong_adam_steps=True)
    assert worst(mixed, whole) > 1e-3


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_families_with_biased_routers_resume_on_other_layouts(pool: WorkerPool, tmp_path: Path, family: str) -> None:
    spec = FAMILIES[family]
    whole = pool.run(JOB, layout=UNEVEN_EP2PP2, steps=(0, 1), save=str(tmp_path), then=(2,), spec=spec)
    resumed = pool.run(JOB, layout=Layout(tp=2, ep=2), steps=(2,), resume=whole[0]["folder"], spec=spec)
    assert worst(resumed, whole) < 1e-5
    biases = [name for name in assemble([r["weights"] for r in resumed]) if name.endswith("expert_bias")]
    assert len(biases) == 3, "compared with the other weights"
    lost = pool.run(JOB, layout=Layout(), steps=(2,), resume=whole[0]["folder"], spec=spec, wrong_adam_steps=True)
    assert worst(lost, whole) > 1e-3


def test_bfloat16_resumes_from_its_float32_weights(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(JOB, layout=EP2, steps=(0, 1), save=str(tmp_path), then=(2,), bf16=True)
    resumed = pool.run(JOB, layout=EP2, steps=(2,), resume=whole[0]["folder"], bf16=True)
    assert worst(resumed, whole) < TOLERANCE
    exact = pool.run(JOB, layout=EP2, steps=(0,))
    assert whole[0]["log"][0] == pytest.approx(exact[0]["log"][0], rel=0.05), "rounded, but the same step"


def test_a_damaged_checkpoint_is_one_clear_line(pool: WorkerPool, tmp_path: Path) -> None:
    folder = Path(pool.run(JOB, layout=Layout(), steps=(), save=str(tmp_path))[0]["folder"])
    shard = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(
        Exception, match=rf"UserError: {folder}: not a complete checkpoint: {shard.name} has \d+ of \d+ bytes"
    ):
        pool.run(JOB, layout=Layout(), steps=(), resume=str(folder))
    assert folders.newest_complete(tmp_path) is None


def sealed(root: Path, step: int) -> Path:
    folder = folders.make_room(root, step)
    (folder / "shard").write_bytes(b"x" * 10)
    seal_again(folder, step)
    return folder


def test_damage_that_sizes_do_not_tell_is_one_clear_line(pool: WorkerPool, tmp_path: Path) -> None:
    folder = Path(pool.run(JOB, layout=EP2, steps=(), save=str(tmp_path))[0]["folder"])
    shard = folder / "__1_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(bytes(64) + content[64:])
    with pytest.raises(WorkerFailed) as caught:
        pool.run(JOB, layout=Layout(), steps=(), resume=str(folder))
    said = [line for line in str(caught.value).splitlines() if "errors.UserError: " in line]
    assert len(said) == 1 and f"{folder}: the checkpoint cannot be read: " in said[0], str(caught.value)


def seal_again(folder: Path, step: int) -> None:
    folders.seal(
        folder,
        folders.CheckpointInfo(
            step=step,
            version=step,
            adam_steps=step,
            cursor=Cursor(),
            counters=Counters(),
            seed=0,
            recipe_digest="",
            layout="single",
            model="",
        ),
    )


def test_interrupted_saves_are_passed_over(tmp_path: Path) -> None:
    assert folders.newest_complete(tmp_path / "absent") is None
    sealed(tmp_path, 3)
    (folders.make_room(tmp_path, 4) / "shard").write_bytes(b"x")  # killed before the side file
    cut = sealed(tmp_path, 5)
    side = cut / folders.SIDE_FILE
    side.write_bytes(side.read_bytes()[:-20])  # a torn side file
    (sealed(tmp_path, 6) / "shard").write_bytes(b"x")  # a shard that lost its tail
    (sealed(tmp_path, 7) / "shard").unlink()
    newest = folders.newest_complete(tmp_path)
    assert newest is not None and newest[1].step == 3
    with pytest.raises(UserError, match="damaged"):
        folders.read_info(cut)
    with pytest.raises(UserError, match=r"trainer\.json cannot be read"):
        folders.read_info(folders.folder_of(tmp_path, 4))
    other = folders.folder_of(tmp_path, 3) / folders.SIDE_FILE
    other.write_bytes(msgspec.json.encode({**msgspec.json.decode(other.read_bytes()), "schema": 99}))
    with pytest.raises(UserError, match="schema 99"):
        folders.read_info(other.parent)


def retain(root: Path, keep: int, keep_every: int = 0) -> None:
    for folder in folders.expired(root, keep, keep_every):
        folders.remove(folder)


def test_retention_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 5):
        sealed(tmp_path, step)
    folders.make_room(tmp_path, 4)  # interrupted, older than the newest
    folders.make_room(tmp_path, 9)  # may be under way
    retain(tmp_path, 2)
    assert [step for step, _ in folders.numbered(tmp_path)] == [3, 5, 9]
    for step in (10, 11, 12):
        sealed(tmp_path, step)
    retain(tmp_path, 1, keep_every=5)
    assert [step for step, _ in folders.numbered(tmp_path)] == [5, 10, 12]


def test_a_lost_index_is_seen(tmp_path: Path) -> None:
    folder = folders.make_room(tmp_path, 1)
    (folder / ".metadata").write_bytes(b"x" * 10)
    (folder / ".metadata.tmp").write_bytes(b"left over")
    seal_again(folder, 1)
    (folder / ".metadata.tmp").unlink()
    assert list(folders.read_info(folder).files) == [".metadata"]
    (folder / ".metadata").write_bytes(b"x" * 9)
    with pytest.raises(UserError, match=r"\.metadata has 9 of 10 bytes"):
        folders.read_info(folder)
