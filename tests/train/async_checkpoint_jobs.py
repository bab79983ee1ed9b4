"""Saves that go on while training does, and ranks that die or cannot write in the middle of one; run in each worker."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry import run_folder
from moe_asyncrl.train import checkpoint, checkpoint_write
from moe_asyncrl.train.checkpoint_write import Writing
from tests.train.checkpoint_jobs import info_of, new_state, one_step


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """The writing begins when the event is set, and at the end of the block."""
    go = threading.Event()
    real = Writing._write

    def write(self: Writing) -> None:
        go.wait()
        real(self)

    Writing._write = write  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        Writing._write = real  # type: ignore[method-assign]


def both_ways(layout: Layout, *, spec: ModelSpec, root: str, alias: bool = False) -> dict[str, Any]:
    """The same state saved at once and, to another folder, while two more steps are trained.

    `alias`: planted, the weights are not copied.
    """
    state = new_state(layout, changes={}, spec=spec)
    log = [one_step(state, step) for step in (0, 1)]
    at_once = checkpoint.save(state, Path(root) / "at-once", info_of(state, 2), keep=2)
    own = checkpoint_write._own
    if alias:
        checkpoint_write._own = lambda data, _ours: data
    try:
        with held_back() as go:
            begun = checkpoint.begin(state, Path(root) / "later", info_of(state, 2))
            unfinished = begun.writing.all_written()
            log += [one_step(state, step) for step in (2, 3)]
            for chunk in state.model.chunks:  # as a run would whose biases balance the experts
                for name, buffer in chunk.named_buffers():
                    if name.endswith("expert_bias"):
                        buffer += 1.0
            go.set()
            later = checkpoint.finish(begun, keep=2)
    finally:
        checkpoint_write._own = own
    return {"folders": (str(at_once), str(later)), "early": unfinished, "bytes": begun.writing.bytes, "log": log}


def killed(layout: Layout, *, root: str, moment: str, rank: int) -> None:
    """Complete the checkpoint of step 2, train one more, begin the next; `rank` is killed at `moment`."""
    state = new_state(layout, changes={})
    for step in (0, 1):
        one_step(state, step)
    checkpoint.save(state, Path(root), info_of(state, 2), keep=1)
    one_step(state, 2)
    if dist.get_rank() == rank:
        _plant_death(moment)
    begun = checkpoint.begin(state, Path(root), info_of(state, 3))
    one_step(state, 3)
    checkpoint.finish(begun, keep=1)


def _plant_death(moment: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "copied":
        Writing._write = die  # type: ignore[method-assign]
    elif moment == "half a file":
        os.fsync = die  # Megatron-Core's writer has not flushed its stream then
    elif moment == "files written":
        Writing.complete = die  # type: ignore[method-assign]
    elif moment == "before the side file":
        write = run_folder.os.replace

        def replace(source: Any, target: Any) -> None:
            die() if str(target).endswith("trainer.json") else write(source, target)

        run_folder.os.replace = replace  # type: ignore[assignment]
    else:
        assert moment == "older one half removed"
        shutil.rmtree = die  # type: ignore[assignment]


def full_disk(layout: Layout, *, root: str, rank: int) -> None:
    """As `killed`, but `rank` finds no space for its first file of step 3, and the others go on to the next look."""
    state = new_state(layout, changes={})
    one_step(state, 0)
    checkpoint.save(state, Path(root), info_of(state, 1), keep=1)
    with held_back() as go:
        writing = checkpoint.begin(state, Path(root), info_of(state, 3)).writing
        if dist.get_rank() == rank:
            (writing.folder / f"__{rank}_0.distcp").symlink_to("/dev/full")
        assert not writing.all_written()
        go.set()
        assert writing.thread is not None
        writing.thread.join(20)
        one_step(state, 1)
        writing.all_written()


def stalled(layout: Layout, *, root: str) -> None:
    """A save whose last rank never gets anything onto the disk."""
    state = new_state(layout, changes={})
    last = dist.get_rank() == layout.world_size - 1
    with held_back() if last else nullcontext():
        checkpoint.finish(checkpoint.begin(state, Path(root), info_of(state, 1)), keep=1, stall_s=0.5)


def gathers(layout: Layout, *, changes: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    """(key, this rank receives it, its numbers are those of Megatron-Core's own gather) of each parameter's state."""
    from moe_asyncrl.train.optimizer_state import KEYS, gathered

    state = new_state(layout, changes=changes)
    one_step(state, 0)
    found = []
    for part in checkpoint._parts(state.optimizer):
        theirs = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        ours = gathered(part)
        for number, buffer in enumerate(part.buffers):
            ((dtype, expected),) = theirs[number].items()
            for start, end, _ in buffer.param_index_map.values():
                for key in KEYS:
                    same = bool(ours[number][dtype][key][start:end].equal(expected[key][start:end]))
                    found.append((key, dist.get_rank(part.data_parallel_group) == 0, same))
    return found
