"""Recipe file and overrides -> `Recipe`. Every error names file, line and field, and says what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from moe_asyncrl.config.check import check
from moe_asyncrl.config.recipe import Recipe


class RecipeError(ValueError):
    """A recipe that cannot be used: one line, for the user."""


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe, apply `section.field=value` overrides, validate.

    Raises `RecipeError` for a missing file, broken YAML, an unknown key (with the nearest known one), a value of the
    wrong type or out of range, or fields that contradict each other.
    """
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"{file}: no such recipe file")
    text = file.read_text(encoding="utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        raise RecipeError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{file}: expected sections (model:, data:, ...), found {type(data).__name__}")
    lines = _lines(root)
    origin: dict[str, str] = {}
    for override in overrides:
        key, value = parse_override(override)
        _set(data, key, value, override)
        origin[key] = f"override {override!r}"

    def where(field: str) -> str:
        while field:
            if field in origin:
                return origin[field]
            if field in lines:
                return f"{file}:{lines[field]}"
            field = field.rpartition(".")[0]
        return str(file)

    return _with_folder(_convert(data, where), file)


def _with_folder(recipe: Recipe, file: Path) -> Recipe:
    """Remember where the recipe stands: a reward function of the user's own is looked for there first."""
    if ":" not in recipe.reward.function or recipe.reward.folder is not None:
        return recipe
    reward = msgspec.structs.replace(recipe.reward, folder=str(file.resolve().parent))
    return msgspec.structs.replace(recipe, reward=reward)


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Validate a recipe that was made by a program. Raises `RecipeError`."""
    return _convert(data, lambda field: "recipe")


def parse_override(text: str) -> tuple[str, Any]:
    """`optimizer.lr=1e-5` -> ("optimizer.lr", "1e-5"); values are YAML. Raises `RecipeError` for any other form."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", key.strip()):
        raise RecipeError(f"override {text!r}: expected section.field=value, for example optimizer.lr=1e-5")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise RecipeError(f"override {text!r}: the value is not valid YAML") from None


def dump_recipe(recipe: Recipe) -> str:
    """YAML of the resolved recipe, every field written out; `load_recipe` reads it back to the same value."""
    return yaml.safe_dump(msgspec.to_builtins(recipe), sort_keys=False, allow_unicode=True)


def _convert(data: dict[str, Any], where: Callable[[str], str]) -> Recipe:
    try:
        # YAML 1.1 reads 1e-6 as text; lenient conversion takes it as the number it is.
        recipe = msgspec.convert(data, Recipe, strict=False)
    except msgspec.ValidationError as error:
        raise RecipeError(_explain(str(error), data, where)) from None
    problem = check(recipe)
    if problem is not None:
        field, text = problem
        raise RecipeError(f"{where(field)}: {field}: {text}")
    return recipe


def _explain(message: str, data: dict[str, Any], where: Callable[[str], str]) -> str:
    what, _, at = message.partition(" - at `$")
    field = at.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        key = unknown[1]
        path = f"{field}.{key}" if field else key
        known = _known(field)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0 if len(known) == 1 else 0.4)
        advice = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{where(path)}: unknown key {path!r}; {advice}"
    missing = re.search(r"missing required field `(.*)`", what)
    if missing:
        return f"{where(field)}: missing {f'{field}.{missing[1]}' if field else missing[1]!r}; it has no default"
    found: Any = data
    for part in field.split(".") if field else ():
        found = found.get(part) if isinstance(found, dict) else None
    return f"{where(field)}: {field or 'recipe'}: {what[0].lower()}{what[1:]}, found {found!r}"


def _known(section: str) -> list[str]:
    kind: Any = Recipe
    for part in section.split(".") if section else ():
        kind = {f.name: f.type for f in msgspec.structs.fields(kind)}[part]
    return [f.name for f in msgspec.structs.fields(kind)]


def _lines(node: Any, prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            found[path] = key.start_mark.line + 1
            found.update(_lines(value, path))
    return found


def _set(data: dict[str, Any], key: str, value: Any, override: str) -> None:
    *sections, last = key.split(".")
    at = data
    for part in sections:
        if not isinstance(at.setdefault(part, {}), dict):
            raise RecipeError(f"override {override!r}: {part!r} is not a section")
        at = at[part]
    at[last] = value
