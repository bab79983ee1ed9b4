"""The recipe's schema for people and programs: types, bounds, defaults and the sentence under each field."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_asyncrl.config import recipe as recipe_module
from moe_asyncrl.config.recipe import Recipe, Section, Source

SOURCES = "An entry of `data.train`, `data.eval` or `warmup.data`, where that is a list."
"""Where a source stands, which is no section of its own."""
HEAD = """# The recipe

Every field, with its type and bounds, its default and what it means. A recipe is a YAML file of these sections; only
`model.path` and `data.train` have no default. An unknown key is an error that names the nearest one. Any field can be
changed on the command line: `optimizer.lr=2e-6`.

```
moe-asyncrl config show my-recipe.yaml    # a recipe with all defaults filled in
moe-asyncrl config schema                 # this page as plain text; --json: JSON Schema; --markdown: this page
```

`moe-asyncrl config schema --markdown > docs/recipe.md` writes this page from `moe_asyncrl/config/recipe.py`.
"""


@dataclass(frozen=True)
class FieldRow:
    """One field as a person reads it."""

    name: str
    kind: str
    """Type and bounds."""
    default: str | None
    """JSON; none where the field is required."""
    sentence: str


def field_docs() -> dict[str, dict[str, str]]:
    """Section class name -> field -> sentence, from the source of `recipe.py`."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(recipe_module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found: dict[str, str] = {}
        for this, following in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(this, ast.AnnAssign)
                and isinstance(this.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                found[this.target.id] = " ".join(str(following.value.value).split())
        docs[node.name] = found
    return docs


def json_schema() -> dict[str, Any]:
    """JSON Schema of the recipe with a description for every field."""
    schema = msgspec.json.schema(Recipe)
    docs = field_docs()
    for name, definition in schema["$defs"].items():
        for field, prop in definition.get("properties", {}).items():
            if field in docs.get(name, {}):
                prop["description"] = docs[name][field]
    return schema


def sections() -> Iterator[tuple[str, str, list[FieldRow]]]:
    """(name, what it is, its fields) of each section in the recipe's order, and of a source of prompts at the end."""
    docs = field_docs()
    definitions = msgspec.json.schema(Recipe)["$defs"]

    def rows(kind: type[Section]) -> list[FieldRow]:
        properties = definitions[kind.__name__]["properties"]
        sentences = docs[kind.__name__]
        return [
            FieldRow(f.name, _type(properties[f.name]), _default(f), sentences.get(f.name, ""))
            for f in msgspec.structs.fields(kind)
        ]

    for section in msgspec.structs.fields(Recipe):
        assert issubclass(section.type, Section)
        yield section.name, (section.type.__doc__ or "").strip(), rows(section.type)
    yield "source", f"{(Source.__doc__ or '').strip()} {SOURCES}", rows(Source)


def reference() -> str:
    """The reference on a terminal: one line a field, by section."""
    lines: list[str] = []
    for name, what, rows in sections():
        lines += ["", f"{name}:  # {what}"]
        for row in rows:
            default = "required" if row.default is None else f"default {row.default}"
            lines.append(f"  {row.name}: {row.kind}; {default}. {row.sentence}")
    return "\n".join(lines[1:]) + "\n"


def markdown() -> str:
    """The reference as the document docs/recipe.md: a table a section."""
    parts = [HEAD]
    for name, what, rows in sections():
        parts.append(f"\n## `{name}`\n\n{what}\n\n| field | type | default | |\n|---|---|---|---|\n")
        for row in rows:
            default = "required" if row.default is None else f"`{row.default}`"
            cells = (f"`{row.name}`", row.kind, default, row.sentence)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def _default(f: Any) -> str | None:
    if f.required:
        return None
    value = f.default if f.default is not msgspec.NODEFAULT else f.default_factory()
    return msgspec.json.encode(value).decode()


def _type(prop: dict[str, Any]) -> str:
    if "enum" in prop:
        return " | ".join(str(v) for v in prop["enum"])
    if "anyOf" in prop:
        return " or ".join(_type(p) for p in prop["anyOf"])
    if "$ref" in prop:
        return str(prop["$ref"]).rpartition("/")[2].lower()
    if prop.get("type") == "array":
        item = _type(prop["items"])
        return f"list of {item}" if " " in item else f"list of {item}s"
    bounds = [
        f"{sign} {_number(prop[key])}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in prop
    ]
    return " ".join([str(prop.get("type", "any")), ", ".join(bounds)]).strip()


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"
