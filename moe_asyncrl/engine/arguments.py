"""From a recipe to one of its servers."""

from __future__ import annotations

import os
import sys

from moe_asyncrl.config.recipe import Recipe, Rollout
from moe_asyncrl.engine.command import EngineArgs, spread_cores
from moe_asyncrl.models.spec import ModelSpec

TIES = 64
"""Ids with the probability of the k-th likeliest one that top-k may keep beyond k, and k more."""


def interpreter(recipe: Recipe) -> str:
    """The Python that runs SGLang: this one, unless the recipe names another."""
    return recipe.engine.python or sys.executable


def mask_tokens(rollout: Rollout, vocabulary: int) -> int | None:
    """Most ids that a sampling mask may keep; None where the recipe truncates nothing.

    SGLang aborts a request whose mask is longer, it never cuts one. Top-k keeps more than k ids only where several
    share the last probability; without it, top-p and min-p may keep the whole vocabulary.
    """
    if not (rollout.top_k or rollout.top_p < 1 or rollout.min_p > 0):
        return None
    return min(vocabulary, 2 * rollout.top_k + TIES) if rollout.top_k else vocabulary


def engine_args(recipe: Recipe, index: int, *, cpu: bool, api_key: str) -> EngineArgs:
    """The server of engine `index`. Port 0 stands for one that is chosen when the server starts.

    Raises UserError if the model's configuration cannot be read.
    """
    e = recipe.engine
    cores = tuple(sorted(os.sched_getaffinity(0)))
    spec = ModelSpec.from_hf(recipe.model.path)
    return EngineArgs(
        model=recipe.model.path,
        port=e.base_port + index if e.base_port else 0,
        python=interpreter(recipe),
        host=e.host,
        dtype=e.dtype,
        tp=e.tp,
        ep=e.ep,
        moe=spec.is_moe,
        context_length=recipe.model.max_context,
        max_running_requests=e.max_running_requests,
        max_total_tokens=e.max_total_tokens,
        # Engines with one seed would sample the same answers to the same prompt.
        random_seed=recipe.run.seed + index,
        api_key=api_key,
        mask_tokens=mask_tokens(recipe.rollout, spec.vocab_size),
        metrics=recipe.telemetry.prometheus,
        colocated=recipe.engine.colocated,
        cores=spread_cores(e.tp, index, cores) if cpu and e.tp > 1 else (),
        extra_args=e.extra_args,
    )
