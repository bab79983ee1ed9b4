"""The recipe's schema for people and programs: types, bounds, defaults and the sentence under each field."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import msgspec

from moe_asyncrl.config import recipe as recipe_module
from moe_asyncrl.config.recipe import Recipe, Section


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


def reference() -> str:
    """The reference that a person reads: one line a field, by section."""
    docs = field_docs()
    definitions = msgspec.json.schema(Recipe)["$defs"]
    lines: list[str] = []
    for section in msgspec.structs.fields(Recipe):
        kind = section.type
        assert issubclass(kind, Section)
        lines += ["", f"{section.name}:  # {(kind.__doc__ or '').strip()}"]
        properties = definitions[kind.__name__]["properties"]
        for f in msgspec.structs.fields(kind):
            default = "required" if f.required else f"default {msgspec.json.encode(f.default).decode()}"
            lines.append(f"  {f.name}: {_type(properties[f.name])}; {default}. {docs[kind.__name__].get(f.name, '')}")
    return "\n".join(lines[1:]) + "\n"


def _type(prop: dict[str, Any]) -> str:
    if "enum" in prop:
        return " | ".join(str(v) for v in prop["enum"])
    if "anyOf" in prop:
        return " or ".join(_type(p) for p in prop["anyOf"])
    bounds = [
        f"{sign} {prop[key]:g}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in prop
    ]
    return " ".join([str(prop.get("type", "any")), ", ".join(bounds)]).strip()
