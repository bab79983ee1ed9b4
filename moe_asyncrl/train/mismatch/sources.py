"""Weights by version: what a run folder still has of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.recorded import RecordedGroup
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.checkpoint_folder import complete_steps, folder_of, newest_complete, read_info
from moe_asyncrl.train.passes import ModelOnRank


def sources_of(folder: RunFolder, recipe: Recipe) -> dict[int, Path]:
    """Folder of the weights of each version that there still is: checkpoints, and what the run started from.

    Version 0 is `model.path`, or after a warm-up the reference's weights if the run kept them.
    """
    found = {}
    for step in complete_steps(folder.checkpoints):
        path = folder_of(folder.checkpoints, step)
        found[read_info(path).version] = path
    if 0 not in found:
        kept = newest_complete(folder.reference)
        if recipe.warmup.steps == 0 or recipe.algorithm.objective == "sft":
            found[0] = Path(recipe.model.path)
        elif kept is not None:
            found[0] = kept[0]
    return found


def load(model: ModelOnRank, source: Path) -> None:
    """Read weights into a model in place, from an HF directory or a trainer's checkpoint of any layout.

    Raises `UserError` if they are damaged, or of another model.
    """
    from moe_asyncrl.checkpoint.hf_load import load_hf
    from moe_asyncrl.train import checkpoint

    if (source / "config.json").is_file():
        load_hf(model.chunks, model.spec, model.layout, source, rank=model.rank)
    else:
        checkpoint.load_weights(model, source)


def touches(group: RecordedGroup, version: int, *, sampled: bool = False) -> bool:
    """Whether the group may hold tokens that these weights sampled; without `sampled`, or was trained from them."""
    trained = not sampled and group.version == version
    return trained or any(h.oldest_version <= version <= h.newest_version for h in group.headers)


def choose_version(groups: Sequence[RecordedGroup], sources: Iterable[int], *, sampled: bool = False) -> int:
    """The newest version that there are weights of and that recorded groups have to do with; else the newest one.

    `sampled`: as in `touches`. Raises `UserError` if there are no weights at all.
    """
    ordered = sorted(sources, reverse=True)
    if not ordered:
        raise UserError("the run has no complete checkpoint, and what it started from was not kept: nothing to look at")
    return next((v for v in ordered if any(touches(g, v, sampled=sampled) for g in groups)), ordered[0])
