"""An export beside a run that goes on and removes what is being read; run in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.train.checkpoint_jobs import info_of, new_state, one_step, weights


def weights_of(state: Any) -> dict[str, torch.Tensor]:
    return {part.name: part.value for part in weights(state)}


def read_beside_a_run(layout: Layout, *, run: str, step: int | None, saves: int) -> list[str]:
    """Read the checkpoint of `step`; as the reading begins, the run has trained on and kept only its newest one.

    `saves`: how often that happens. Returns which steps' weights came out.
    """
    from megatron.core import dist_checkpointing

    from moe_asyncrl.cluster.export import read
    from moe_asyncrl.train import checkpoint

    folder = RunFolder(Path(run))
    state = new_state(layout, changes={})
    after: dict[str, dict[str, torch.Tensor]] = {}

    def go_on(keep: int) -> None:
        done = len(after)
        one_step(state, done)
        after[str(done + 1)] = weights_of(state)
        checkpoint.save(state, folder.checkpoints, info_of(state, done + 1), keep=keep)

    go_on(2)
    go_on(2)
    load = dist_checkpointing.load

    def load_late(wanted: Any, source: str) -> Any:
        if len(after) < 2 + saves:
            go_on(1)
        return load(wanted, source)

    dist_checkpointing.load = load_late
    try:
        other = new_state(layout, changes={})
        read(other, folder, step)
    finally:
        dist_checkpointing.load = load
    found = weights_of(other)
    return [name for name, kept in after.items() if all(torch.equal(found[n], kept[n]) for n in kept)]
