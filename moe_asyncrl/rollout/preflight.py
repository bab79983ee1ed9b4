"""What a rollout needs, looked at before anything is started."""

from __future__ import annotations

import asyncio

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.prompts import eval_prompts, train_prompts
from moe_asyncrl.scoring.scorer import Scorer, search_folders


def check_data(recipe: Recipe) -> None:
    """Raise UserError if a prompt file, the tokenizer or the reward function cannot be used. Reads every prompt once.

    Supervised runs have their data checked by the trainer; here only prompts that are sampled from are.
    """
    if recipe.algorithm.objective != "grpo":
        return
    asyncio.run(_load_reward(recipe))
    tokenizer = Tokenizer.load(recipe.model.path)
    train_prompts(recipe, tokenizer)
    eval_prompts(recipe, tokenizer)


def check_eval(recipe: Recipe) -> None:
    """Raise UserError if the recipe names no held-out file, or it, the tokenizer or the reward cannot be used."""
    if recipe.data.eval is None:
        raise UserError("data.eval is not set: there is nothing to evaluate on")
    asyncio.run(_load_reward(recipe))
    eval_prompts(recipe, Tokenizer.load(recipe.model.path))


async def _load_reward(recipe: Recipe) -> None:
    scorer = await Scorer.start(recipe.reward, search=search_folders(recipe.reward))
    await scorer.close()
