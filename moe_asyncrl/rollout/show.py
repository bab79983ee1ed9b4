"""`moe-asyncrl data show`: the first prompts as the model will see them, before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from moe_asyncrl.config.recipe import Recipe, Source
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.data.sources.opening import Prompts, open_prompts
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.prompts import preparation

RECIPES = (".yaml", ".yml")
RULE = "-" * 72


def show(target: str, overrides: Sequence[str] = (), *, limit: int, tokenize: bool, held_out: bool) -> Iterator[str]:
    """Lines about a recipe's prompts in the order of its run, or about the prompts behind a path in their own order.

    `overrides` are `section.field=value` of a recipe, or `field=value` of a source beside a path. With a recipe every
    prompt shown is checked as before a run. Raises UserError (or RecipeError) for what cannot be
    read, and for `tokenize` or `held_out` without a recipe.
    """
    if Path(target).suffix in RECIPES:
        from moe_asyncrl.config.load import load_recipe

        yield from _recipe(load_recipe(target, overrides), limit, tokenize, held_out)
        return
    for given, option in ((tokenize, "--tokenize"), (held_out, "--eval")):
        if given:
            raise UserError(f"data show: {option} needs a recipe: a path alone names no model")
    prompts = open_prompts((_source(target, overrides),), use="train", seed=0, limit=limit)
    try:
        for number, prompt in enumerate(prompts):
            yield from _one(number, prompt, f"{len(prompt.text)} characters", prompt.text)
    finally:
        prompts.close()


def _source(path: str, settings: Sequence[str]) -> Source:
    """The path as a source, with `field=value` settings as a recipe has them. Raises UserError for others."""
    pairs = [setting.partition("=") for setting in settings]
    fields = {key: value for key, _, value in pairs}
    try:
        return msgspec.convert({**fields, "path": path}, Source, strict=False)
    except msgspec.ValidationError as e:
        known = ", ".join(f.name for f in msgspec.structs.fields(Source))
        raise UserError(f"data show: {' '.join(settings)}: {e}; a source has: {known}") from None


def _recipe(recipe: Recipe, limit: int, tokenize: bool, held_out: bool) -> Iterator[str]:
    entry = recipe.data.eval if held_out else recipe.data.train
    if entry is None:
        raise UserError("data.eval is not set: there is nothing to show")
    prompts = open_prompts(
        entry,
        use="eval" if held_out else "train",
        seed=recipe.run.seed,
        limit=recipe.eval.max_prompts if held_out else None,
        every_row=False,
    )
    try:
        yield from _sources(prompts, entry, recipe)
        yield from _prompts(recipe, prompts, limit, tokenize, held_out)
    finally:
        prompts.close()


def _sources(prompts: Prompts, entry: str | tuple[Source, ...], recipe: Recipe) -> Iterator[str]:
    whole = sum(part.weight for part in prompts.parts)
    for part, size in zip(prompts.parts, prompts.sizes, strict=True):
        reward = part.reward or recipe.reward.function
        name = part.name or str(entry)
        yield f"source {name}: {size:,} prompts, weight {part.weight:g} ({part.weight / whole:.1%}), reward {reward}"


def _prompts(recipe: Recipe, prompts: Prompts, limit: int, tokenize: bool, held_out: bool) -> Iterator[str]:
    tokenizer = Tokenizer.load(recipe.model.path)
    longest = (recipe.eval.max_new_tokens if held_out else None) or recipe.rollout.max_new_tokens
    prepare = preparation(recipe, tokenizer, max_new_tokens=longest)
    order = prompts.order(seed=recipe.run.seed, shuffle=recipe.data.shuffle and not held_out)
    count = min(limit, len(prompts)) if held_out else limit
    for number in range(count):
        position = number if held_out else order.at(number)[1]
        ready = prepare(prompts[position])
        ids = ready.ids.tolist()
        size = f"{len(ids)} tokens, answer up to {ready.max_new_tokens}, context {recipe.model.max_context}"
        yield from _one(number, ready.prompt, size, tokenizer.decode(ids, keep_special=True))
        if tokenize:
            yield "tokens: " + " ".join(f"{i}={tokenizer.decode([i], keep_special=True)!r}" for i in ids)


def _one(number: int, prompt: Prompt, size: str, text: str) -> Iterator[str]:
    yield RULE
    yield f"[{number}] {prompt.source}  {f'source {prompt.name}  ' if prompt.name else ''}{size}"
    yield text
    yield f"answer: {'none' if prompt.answer is None else repr(prompt.answer)}"
    if metadata := prompt.metadata_text():
        yield "metadata: " + ", ".join(f"{k}={_short(v)}" for k, v in metadata.items())


def _short(value: str) -> str:
    return value if len(value) <= 60 else value[:57] + "..."
