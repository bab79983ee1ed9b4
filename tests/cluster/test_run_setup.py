"""Which run a resume goes on with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moe_asyncrl.cluster.run_setup import find_resumable
from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo, make_room, seal


def recipe_in(base: Path) -> Recipe:
    recipe = load_recipe(Path("configs/recipes/demo.yaml"))
    return msgspec.structs.replace(recipe, run=msgspec.structs.replace(recipe.run, name="mine", folder=str(base)))


def write_run(base: Path, name: str, *, complete: bool) -> Path:
    """A run whose first checkpoint is whole, or was being written when the run was killed."""
    folder = make_room(base / name / "checkpoints", 4)
    (base / name / "recipe.yaml").write_text("")
    (folder / "weights").write_bytes(b"12345")
    if complete:
        info = CheckpointInfo(
            step=4,
            version=4,
            adam_steps=4,
            cursor=Cursor(),
            counters=Counters(),
            seed=0,
            recipe_digest="",
            layout="single",
            model="",
        )
        seal(folder, info)
    return base / name


def test_a_run_killed_before_its_first_checkpoint_was_whole_is_passed_over(tmp_path: Path) -> None:
    older = write_run(tmp_path, "mine-20260101-000000", complete=True)
    write_run(tmp_path, "mine-20260102-000000", complete=False)
    assert find_resumable(recipe_in(tmp_path)).path == older


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    write_run(tmp_path, "mine-20260102-000000", complete=False)
    with pytest.raises(UserError, match="no run named 'mine' with a complete checkpoint"):
        find_resumable(recipe_in(tmp_path))
