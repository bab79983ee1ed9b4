"""What a rollout needs, looked at before anything is started."""

from __future__ import annotations

import asyncio

import msgspec

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.prompts import eval_prompts, reward_functions, train_prompts
from moe_asyncrl.scoring.scorer import Scorer, search_folders


def check_data(recipe: Recipe) -> None:
    """Raise UserError if prompts, the tokenizer or a reward function cannot be used. Reads every prompt of a file once.

    Supervised runs have their data checked by the trainer; here only prompts that are sampled from are.
    """
    if recipe.algorithm.objective != "grpo":
        return
    asyncio.run(_load_rewards(recipe, reward_functions(recipe)))
    tokenizer = Tokenizer.load(recipe.model.path)
    train_prompts(recipe, tokenizer).close()
    held_out = eval_prompts(recipe, tokenizer)
    if held_out is not None:
        held_out.close()


def check_eval(recipe: Recipe) -> None:
    """Raise UserError if the recipe names no held-out file, or it, the tokenizer or the reward cannot be used."""
    if recipe.data.eval is None:
        raise UserError("data.eval is not set: there is nothing to evaluate on")
    asyncio.run(_load_rewards(recipe, reward_functions(recipe, train=False)))
    held_out = eval_prompts(recipe, Tokenizer.load(recipe.model.path))
    assert held_out is not None
    held_out.close()


async def _load_rewards(recipe: Recipe, functions: tuple[str, ...]) -> None:
    one_each = msgspec.structs.replace(recipe.reward, workers=1)
    scorer = await Scorer.start(one_each, search=search_folders(recipe.reward), functions=functions)
    await scorer.close()
