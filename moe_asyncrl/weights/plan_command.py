"""`moe-asyncrl weights plan`: the plan of a recipe's weight updates, made, checked and counted; nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.published import read_published
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.plan import Mode
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_figures import figures, lines
from moe_asyncrl.weights.plan_make import make_plan

PUBLISHED = (".yaml", ".yml")


def show(recipe_path: str, overrides: Sequence[str], *, mode: Mode, as_json: bool) -> Iterator[str]:
    """Lines about the plan; with `as_json` one line, an object with the fields of `plan_figures.Figures`.

    `model.path` may also be a file of `configs/models/`, so that sizes can be tried without weights. Raises UserError
    (or RecipeError) for a recipe or model that cannot be read, layouts that do not fit, or a plan that is wrong.
    """
    recipe = load_recipe(recipe_path, overrides)
    path = Path(recipe.model.path)
    spec = read_published(path).spec if path.suffix in PUBLISHED else ModelSpec.from_hf(path)
    plan = make_plan(
        spec.with_mtp(recipe.model.mtp),
        Layout.of(recipe.trainer),
        (EngineLayout.of(recipe.engine),) * recipe.engine.count,
        mode=mode,
        dtype=recipe.engine.dtype,
        bucket_bytes=recipe.weights.bucket_mib * 2**20,
        roots_per_stage=recipe.weights.roots_per_stage,
    )
    check(plan)
    found = figures(plan)
    if as_json:
        yield json.dumps(found.as_json())
    else:
        yield from lines(plan, found)
