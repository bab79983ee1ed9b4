"""Recipe file and overrides -> `Recipe`. Every error names file, line and field, and says what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import yaml

from moe_asyncrl.config.check import check
from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.recipe import Recipe, sources_of

T = TypeVar("T", bound=msgspec.Struct)
Check = Callable[[T], tuple[str, str] | None]
"""Contradictions between fields: (field, what is wrong), or None."""


class RecipeError(ValueError):
    """A recipe or cluster file that cannot be used: one line, for the user."""


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe, apply `section.field=value` overrides, validate.

    Raises `RecipeError` for a missing file, broken YAML, an unknown key (with the nearest known one), a value of the
    wrong type or out of range, or fields that contradict each other.
    """
    return _with_folder(read_typed(path, Recipe, check, "recipe", overrides), Path(path))


def load_cluster(path: Path | str) -> Cluster:
    """Read a cluster file and validate it. Raises `RecipeError` in the same words as `load_recipe`."""
    return read_typed(path, Cluster, lambda cluster: None, "cluster")


def read_typed(path: Path | str, kind: type[T], check: Check[T], what: str, overrides: Sequence[str] = ()) -> T:
    """A YAML file with overrides laid over it, as a `kind`; `what` names such files in errors. Raises `RecipeError`."""
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"{file}: no such {what} file")
    text = file.read_text(encoding="utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        raise RecipeError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        example = f"sections ({', '.join(f'{f.name}:' for f in msgspec.structs.fields(kind)[:2])}, ...)"
        raise RecipeError(f"{file}: expected {example}, found {type(data).__name__}")
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
            field = field[: max(field.rfind("."), field.rfind("["), 0)]
        return str(file)

    return _convert(data, where, kind, check)


def _with_folder(recipe: Recipe, file: Path) -> Recipe:
    """Remember where the recipe stands: a reward function of the user's own is looked for there first."""
    used = [recipe.reward.function, *(s.reward for s in sources_of(recipe) if s.reward is not None)]
    if not any(":" in name for name in used) or recipe.reward.folder is not None:
        return recipe
    reward = msgspec.structs.replace(recipe.reward, folder=str(file.resolve().parent))
    return msgspec.structs.replace(recipe, reward=reward)


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Validate a recipe that was made by a program. Raises `RecipeError`."""
    return _convert(data, lambda field: "recipe", Recipe, check)


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


def _convert(data: dict[str, Any], where: Callable[[str], str], kind: type[T], check: Check[T]) -> T:
    try:
        # YAML 1.1 reads 1e-6 as text; lenient conversion takes it as the number it is.
        value = msgspec.convert(data, kind, strict=False)
    except msgspec.ValidationError as error:
        raise RecipeError(_explain(str(error), data, where, kind)) from None
    problem = check(value)
    if problem is not None:
        field, text = problem
        raise RecipeError(f"{where(field)}: {field}: {text}")
    return value


def _explain(message: str, data: dict[str, Any], where: Callable[[str], str], root: type) -> str:
    what, _, at = message.partition(" - at `$")
    field = at.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        key = unknown[1]
        path = f"{field}.{key}" if field else key
        known = _known(root, field)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0 if len(known) == 1 else 0.4)
        advice = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{where(path)}: unknown key {path!r}; {advice}"
    missing = re.search(r"missing required field `(.*)`", what)
    if missing:
        return f"{where(field)}: missing {f'{field}.{missing[1]}' if field else missing[1]!r}; it has no default"
    found: Any = data
    for part in re.findall(r"[^.\[\]]+", field):
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return f"{where(field)}: {field or 'recipe'}: {what[0].lower()}{what[1:]}, found {found!r}"


def _known(root: type, section: str) -> list[str]:
    kind: Any = root
    for part in section.split(".") if section else ():
        kind = _struct_in({f.name: f.type for f in msgspec.structs.fields(kind)}[part.partition("[")[0]])
    return [f.name for f in msgspec.structs.fields(kind)]


def _struct_in(kind: Any) -> Any:
    """The section inside an optional one, or inside a list of them; None if there is none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for k in get_args(kind) if (found := _struct_in(k)) is not None), None)


def _lines(node: Any, prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            found[path] = key.start_mark.line + 1
            found.update(_lines(value, path))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            found[f"{prefix}[{number}]"] = item.start_mark.line + 1
            found.update(_lines(item, f"{prefix}[{number}]"))
    return found


def _set(data: dict[str, Any], key: str, value: Any, override: str) -> None:
    *sections, last = key.split(".")
    at = data
    for part in sections:
        if not isinstance(at.setdefault(part, {}), dict):
            raise RecipeError(f"override {override!r}: {part!r} is not a section")
        at = at[part]
    at[last] = value
