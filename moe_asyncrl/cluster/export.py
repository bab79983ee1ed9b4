"""`moe-asyncrl export`: a trainer checkpoint, whatever layout wrote it, as an HF directory."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import SIDE_FILE, complete_steps, folder_of, newest_complete, read_info

if TYPE_CHECKING:
    from moe_asyncrl.checkpoint.hf_export import Form
    from moe_asyncrl.train.build import TrainState

log = logging.getLogger(__name__)
ATTEMPTS = 3
"""Checkpoints tried: a run that goes on removes older ones."""


def export_run(run: str, out: str, *, step: int | None = None, form: Form = "plain") -> Path:
    """Write the checkpoint of `step` (the newest complete one if not given) to the new directory `out`.

    In the form `fp8`, weights that are FP8 in `model.path` are FP8 again, and all others have the type they have there.
    Runs in this process on the CPU. Raises `UserError` if there is no such checkpoint, `out` is not empty, or
    `model.path` is not FP8 where that is asked for.
    """
    with warnings.catch_warnings():
        # Megatron warns of every package that it could use and does not find: nothing that a user of ours can act on.
        warnings.simplefilter("ignore")
        return _export(*open_run(run), Path(out), step, form)


def _export(folder: RunFolder, recipe: Recipe, out: Path, step: int | None, form: Form) -> Path:
    from moe_asyncrl.checkpoint.hf_export import check_form, check_place, export_hf
    from moe_asyncrl.models.layout import Layout
    from moe_asyncrl.models.spec import ModelSpec
    from moe_asyncrl.train.build import build_train_state
    from moe_asyncrl.train.parallel import ParallelRuntime

    check_place(out, Path(recipe.model.path))
    check_form(form, Path(recipe.model.path))
    choose(folder, step)
    spec = ModelSpec.from_hf(recipe.model.path).with_mtp(recipe.model.mtp)
    capabilities = Capabilities()
    layout = Layout()
    runtime = ParallelRuntime(capabilities, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        runtime.setup(layout)
        dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        state = build_train_state(spec, layout, capabilities, recipe.optimizer, rank=0, dtype=dtype)
        read(state, folder, step)
        stored = dtype if form == "plain" else None
        export_hf(state.model.chunks, spec, layout, out, source_hf_dir=recipe.model.path, dtype=stored, form=form)
    finally:
        runtime.close()
    return out


def choose(folder: RunFolder, step: int | None) -> Path:
    """Folder of the complete checkpoint of `step`, the newest one if not given.

    Raises `UserError` if there is none; it lists those that there are.
    """
    if step is None:
        newest = newest_complete(folder.checkpoints)
        if newest is None:
            raise UserError(f"{folder.path}: no complete checkpoint to export")
        return newest[0]
    chosen = folder_of(folder.checkpoints, step)
    try:
        read_info(chosen)
    except UserError as error:
        others = ", ".join(map(str, complete_steps(folder.checkpoints))) or "none"
        why = f" ({error})" if chosen.exists() else ""
        raise UserError(
            f"{folder.path}: no complete checkpoint of step {step}{why}; complete ones are of steps: {others}"
        ) from None
    return chosen


def read(state: TrainState, folder: RunFolder, step: int | None) -> None:
    """Read the checkpoint of `step` into `state`; of a run that goes on, the newest one of the moment that stays.

    Raises `UserError` if it cannot be read, or was removed meanwhile.
    """
    from moe_asyncrl.train.checkpoint import load

    for _ in range(ATTEMPTS):
        source = choose(folder, step)
        try:
            load(state, source)
        except UserError:
            if (source / SIDE_FILE).exists():
                raise
            log.info("%s was removed while it was read", source)
        else:
            return
    raise UserError(
        f"{source}: removed by the run while it was read, as newer ones came; "
        "raise checkpoint.keep or checkpoint.keep_every, or export another step"
    )
