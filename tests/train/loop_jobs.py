"""The trainer's role in each worker: everything but the engines, whose part a commit takes."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.pool.machine import CPU
from tests.train.checkpoint_jobs import weights


def go(
    layout: Layout, *, run: str, stop_after: int | None = None, hold: int | None = None, dies: bool = False
) -> dict[str, Any]:
    """Run the trainer of the run folder `run`; the last rank alone is asked to stop, after `stop_after` steps.

    No byte of the checkpoint of step `hold` is written before the step after it is done; then, if it `dies`, the last
    rank is killed instead.
    """
    from moe_asyncrl.train import role
    from moe_asyncrl.train.build import build_train_state
    from moe_asyncrl.train.checkpoint_write import Writing
    from moe_asyncrl.train.publish import PublishReport
    from moe_asyncrl.weights.lockstep import Lockstep

    folder = RunFolder(Path(run))
    recipe = load_recipe(folder.recipe)
    rank, world = dist.get_rank(), layout.world_size
    spec = ModelSpec.from_hf(recipe.model.path)
    lockstep = Lockstep(rank, world)
    published: list[tuple[int, int]] = []
    before = _steps_of(folder, rank)

    def engines(*_: Any) -> tuple[Any, None, Any]:
        def publish(version: int) -> PublishReport:
            if rank == 0:
                client.commit(version, (), ())
            published.append((version, _steps_of(folder, rank)))
            if hold is not None and version == hold + 1:
                if dies and rank == world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                released.set()
            return PublishReport(
                version=version, seconds=0.0, pause_seconds=0.0, bytes=0, buckets=0, engines=(), lost={}
            )

        return publish, None, lambda: None

    def stop() -> bool:
        return stop_after is not None and rank == world - 1 and _steps_of(folder, rank) - before >= stop_after

    released, writes = threading.Event(), Writing._write

    def write(writing: Writing) -> None:
        if writing.what.endswith(f" step {hold}"):
            released.wait()
        writes(writing)

    Writing._write = write  # type: ignore[method-assign]
    real, role._engines = role._engines, engines
    try:
        with ExitStack() as resources:
            client = resources.enter_context(role._join(folder, rank, lockstep))
            state = build_train_state(
                spec,
                layout,
                CPU,
                recipe.optimizer,
                rank=rank,
                recompute=recipe.trainer.recompute,
                hf_dir=recipe.model.path,
            )
            role._go(folder, recipe, state, client, lockstep, stop, resources)
            phase = client.state().phase
    finally:
        role._engines = real
        Writing._write = writes  # type: ignore[method-assign]
        released.set()
    return {"published": published, "weights": weights(state), "phase": phase}


def _steps_of(folder: RunFolder, rank: int) -> int:
    return sum(e["span"] == "step" and e["role"] == f"trainer-{rank}" for e in read_jsonl(folder.events_path))
