"""Prompts ready for sampling: a checked file, tokenised, with each prompt's own longest answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompts import Prompt, PromptFile
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.scoring.scorer import check_prompt


@dataclasses.dataclass(frozen=True)
class ReadyPrompt:
    """A prompt as the engine gets it."""

    prompt: Prompt
    ids: npt.NDArray[np.int32]
    """int32 [P]"""
    max_new_tokens: int


class ReadyPrompts:
    """A prompt file seen through a tokenizer. Lines are parsed and tokenised when they are asked for."""

    def __init__(self, file: PromptFile, prepare: Callable[[Prompt], ReadyPrompt]) -> None:
        self._file = file
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, position: int) -> ReadyPrompt:
        return self._prepare(self._file[position])


def preparation(recipe: Recipe, tokenizer: Tokenizer, *, max_new_tokens: int) -> Callable[[Prompt], ReadyPrompt]:
    """Prompt -> ReadyPrompt by the recipe.

    What it returns raises UserError, naming file and line, for a prompt that cannot be used: no answer where the reward
    needs one, no tokens, too long for the context, a bad `rollout.max_new_tokens_field`.
    """
    own, context = recipe.rollout.max_new_tokens_field, recipe.model.max_context

    def prepare(prompt: Prompt) -> ReadyPrompt:
        check_prompt(recipe.reward, prompt)
        longest = _own_limit(prompt, own, max_new_tokens)
        ids = np.asarray(tokenizer.encode_prompt(prompt, recipe.data.chat), dtype=np.int32)
        if len(ids) + longest > context:
            raise UserError(
                f"{prompt.source}: the prompt has {len(ids)} tokens; with an answer of up to {longest} it does not"
                f" fit into model.max_context {context}"
            )
        return ReadyPrompt(prompt, ids, longest)

    return prepare


def _own_limit(prompt: Prompt, field: str | None, default: int) -> int:
    if field is None or field not in prompt.metadata:
        return default
    value = prompt.metadata[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{prompt.source}: {field!r} must be a whole number of tokens above 0, found {value!r}")
    return value


def train_prompts(recipe: Recipe, tokenizer: Tokenizer) -> ReadyPrompts:
    """The training prompts, all of them checked. Raises UserError as `preparation` and `PromptFile.open` do."""
    prepare = preparation(recipe, tokenizer, max_new_tokens=recipe.rollout.max_new_tokens)
    return ReadyPrompts(PromptFile.open(recipe.data.train, check=lambda p: _ignore(prepare(p))), prepare)


def eval_prompts(recipe: Recipe, tokenizer: Tokenizer) -> ReadyPrompts | None:
    """The first `eval.max_prompts` held-out prompts, checked; None if the recipe names no file."""
    if recipe.data.eval is None:
        return None
    prepare = preparation(recipe, tokenizer, max_new_tokens=recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens)
    file = PromptFile.open(recipe.data.eval, limit=recipe.eval.max_prompts, check=lambda p: _ignore(prepare(p)))
    return ReadyPrompts(file, prepare)


def _ignore(_: ReadyPrompt) -> None:
    """Only the errors count."""
