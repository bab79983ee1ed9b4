"""Prompts ready for sampling: checked sources, tokenised, with each prompt's own longest answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moe_asyncrl.config.recipe import Recipe, Source
from moe_asyncrl.config.sources import source_reward
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.data.sources.opening import Order, Prompts, open_prompts
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
    """Prompts seen through a tokenizer. They are parsed and tokenised when they are asked for."""

    def __init__(self, prompts: Prompts, prepare: Callable[[Prompt], ReadyPrompt]) -> None:
        self.prompts = prompts
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> ReadyPrompt:
        return self._prepare(self.prompts[position])

    def order(self, *, seed: int, shuffle: bool) -> Order:
        """Which position each prompt instance of the run is."""
        return self.prompts.order(seed=seed, shuffle=shuffle)

    def close(self) -> None:
        """Close the files."""
        self.prompts.close()


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


def train_prompts(recipe: Recipe, tokenizer: Tokenizer, *, every_row: bool = True) -> ReadyPrompts:
    """The training prompts, checked: JSON lines all, rows of tables with `every_row`, of a task some.

    Raises UserError as `preparation` and `open_prompts` do.
    """
    prepare = preparation(recipe, tokenizer, max_new_tokens=recipe.rollout.max_new_tokens)
    prompts = open_prompts(
        recipe.data.train,
        use="train",
        seed=recipe.run.seed,
        check=lambda p: _ignore(prepare(p)),
        every_row=every_row,
    )
    return ReadyPrompts(prompts, prepare)


def eval_prompts(recipe: Recipe, tokenizer: Tokenizer) -> ReadyPrompts | None:
    """The first `eval.max_prompts` held-out prompts, checked; None if the recipe names none."""
    if recipe.data.eval is None:
        return None
    prepare = preparation(recipe, tokenizer, max_new_tokens=recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens)
    prompts = open_prompts(
        recipe.data.eval,
        use="eval",
        seed=recipe.run.seed,
        limit=recipe.eval.max_prompts,
        check=lambda p: _ignore(prepare(p)),
    )
    return ReadyPrompts(prompts, prepare)


def reward_functions(recipe: Recipe, *, train: bool = True) -> tuple[str, ...]:
    """The rewards that the prompts of the recipe are scored by; `train` false looks at the held-out ones alone."""
    entries: tuple[str | tuple[Source, ...] | None, ...] = (*((recipe.data.train,) if train else ()), recipe.data.eval)
    default = recipe.reward.function
    found = {
        name
        for entry in entries
        if entry is not None
        for name in ((default,) if isinstance(entry, str) else (source_reward(s, default) for s in entry))
    }
    return tuple(sorted(found))


def _ignore(_: ReadyPrompt) -> None:
    """Only the errors count."""
