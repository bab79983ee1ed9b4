"""`moe-asyncrl export`: a trainer checkpoint, whatever layout wrote it, as an HF directory."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder


def export_run(run: str, out: str, *, step: int | None = None) -> Path:
    """Write the checkpoint of `step` (the newest complete one if not given) to the new directory `out`.

    Runs in this process on the CPU. Raises `UserError` if there is no such checkpoint or `out` is not empty.
    """
    with warnings.catch_warnings():
        # Megatron warns of every package that it could use and does not find: nothing that a user of ours can act on.
        warnings.simplefilter("ignore")
        return _export(*open_run(run), Path(out), step)


def _export(folder: RunFolder, recipe: Recipe, out: Path, step: int | None) -> Path:
    from moe_asyncrl.checkpoint.hf_export import check_place, export_hf
    from moe_asyncrl.models.layout import Layout
    from moe_asyncrl.models.spec import ModelSpec
    from moe_asyncrl.train.build import build_train_state
    from moe_asyncrl.train.checkpoint import load
    from moe_asyncrl.train.checkpoint_folder import folder_of, newest_complete, read_info
    from moe_asyncrl.train.parallel import ParallelRuntime

    check_place(out, Path(recipe.model.path))
    if step is None:
        newest = newest_complete(folder.checkpoints)
        if newest is None:
            raise UserError(f"{folder.path}: no complete checkpoint to export")
        source = newest[0]
    else:
        source = folder_of(folder.checkpoints, step)
        read_info(source)
    spec = ModelSpec.from_hf(recipe.model.path).with_mtp(recipe.model.mtp)
    capabilities = Capabilities()
    layout = Layout()
    runtime = ParallelRuntime(capabilities, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        runtime.setup(layout)
        dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        state = build_train_state(spec, layout, capabilities, recipe.optimizer, rank=0, dtype=dtype)
        load(state, source)
        export_hf(state.model.chunks, spec, layout, out, source_hf_dir=recipe.model.path, dtype=dtype)
    finally:
        runtime.close()
    return out
