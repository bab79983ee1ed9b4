"""From a recipe to one of its servers."""

from __future__ import annotations

import os
import sys

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.engine.command import EngineArgs, spread_cores
from moe_asyncrl.models.spec import ModelSpec


def interpreter(recipe: Recipe) -> str:
    """The Python that runs SGLang: this one, unless the recipe names another."""
    return recipe.engine.python or sys.executable


def engine_args(recipe: Recipe, index: int, *, cpu: bool, api_key: str) -> EngineArgs:
    """The server of engine `index`. Port 0 stands for one that is chosen when the server starts.

    Raises UserError if the model's configuration cannot be read.
    """
    e = recipe.engine
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return EngineArgs(
        model=recipe.model.path,
        port=e.base_port + index if e.base_port else 0,
        python=interpreter(recipe),
        host=e.host,
        dtype=e.dtype,
        tp=e.tp,
        ep=e.ep,
        moe=ModelSpec.from_hf(recipe.model.path).is_moe,
        context_length=recipe.model.max_context,
        max_running_requests=e.max_running_requests,
        max_total_tokens=e.max_total_tokens,
        # Engines with one seed would sample the same answers to the same prompt.
        random_seed=recipe.run.seed + index,
        api_key=api_key,
        metrics=recipe.telemetry.prometheus,
        cores=spread_cores(e.tp, index, cores) if cpu and e.tp > 1 else (),
        extra_args=e.extra_args,
    )
