"""A new run: look at everything a user can get wrong, then make the run folder."""

from __future__ import annotations

import importlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from moe_asyncrl.cluster.sinks import check_sinks
from moe_asyncrl.config.load import dump_recipe, load_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic
from moe_asyncrl.train.checkpoint_folder import newest_complete


def absolute(recipe: Recipe, base: Path) -> Recipe:
    """The recipe with its paths made absolute from `base` (the working directory), as roles start elsewhere."""

    def path(value: str) -> str:
        return str((base / value).resolve())

    def optional(value: str | None) -> str | None:
        return None if value is None else path(value)

    replace = msgspec.structs.replace

    def entry(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(replace(source, path=optional(source.path)) for source in value)
        return optional(value)

    return replace(
        recipe,
        model=replace(recipe.model, path=path(recipe.model.path), reference=optional(recipe.model.reference)),
        data=replace(recipe.data, train=entry(recipe.data.train), eval=entry(recipe.data.eval)),
        reward=replace(recipe.reward, folder=optional(recipe.reward.folder)),
        warmup=replace(recipe.warmup, data=entry(recipe.warmup.data)),
        run=replace(recipe.run, folder=path(recipe.run.folder)),
    )


def preflight(recipe: Recipe) -> None:
    """Raise `UserError` (or `RecipeError`) for what would fail later: model, tokenizer, data, reward, layout.

    Nothing is started and no weights are read; only their headers are.
    """
    check_sinks(recipe)
    checkpoint = importlib.import_module("moe_asyncrl.checkpoint.preflight")
    rollout = importlib.import_module("moe_asyncrl.rollout.preflight")
    checkpoint.check_model(recipe)
    rollout.check_data(recipe)


def create_run_folder(recipe: Recipe) -> RunFolder:
    """Make `FOLDER/NAME-DATE`, write the resolved recipe there and point `FOLDER/latest` at it."""
    base = Path(recipe.run.folder)
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = _unique(base, f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    except OSError as error:
        raise UserError(f"run folder {base}: {error.strerror}; choose another one with run.folder") from None
    write_atomic(folder.recipe, dump_recipe(recipe).encode())
    link(base, folder.path.name)
    return folder


def find_resumable(recipe: Recipe) -> RunFolder:
    """The run folder that `run.resume` goes on with: the newest of that name with a complete checkpoint, or `latest`.

    Nothing is written: another supervisor may be at work on it. Raises `UserError` if there is none.
    """
    base = Path(recipe.run.folder)
    found = sorted(base.glob(f"{recipe.run.name}-*"), reverse=True)
    for path in found:
        folder = RunFolder(path)
        if folder.recipe.exists() and newest_complete(folder.checkpoints) is not None:
            return folder
    raise UserError(f"run.resume: no run named {recipe.run.name!r} with a complete checkpoint in {base}")


def take_up(folder: RunFolder, recipe: Recipe) -> None:
    """Give a run that goes on this recipe, and make it the newest. For its supervisor, once the run is its own."""
    write_atomic(folder.recipe, dump_recipe(recipe).encode())
    link(folder.path.parent, folder.path.name)


def open_run(path: str) -> tuple[RunFolder, Recipe]:
    """An existing run folder and its recipe. Raises `UserError` if it is none."""
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise UserError(f"{path}: not a run folder (no recipe.yaml in it)")
    return folder, load_recipe(folder.recipe)


def link(base: Path, name: str) -> None:
    """Point `latest` at the run, atomically."""
    temporary = base / f".latest.{secrets.token_hex(6)}"
    temporary.symlink_to(name)
    os.replace(temporary, base / "latest")


def _unique(base: Path, name: str) -> RunFolder:
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        try:
            (base / f"{name}{suffix}").mkdir()
        except FileExistsError:
            continue
        return RunFolder(base / f"{name}{suffix}")
    raise UserError(f"{base}: too many runs named {name}")
