"""The document of the recipe is what the schema says today."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from moe_asyncrl.config.recipe import Recipe, Source
from moe_asyncrl.config.schema import markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_it_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == markdown(), "run: moe-asyncrl config schema --markdown > docs/recipe.md"


def test_it_has_a_row_for_every_field_with_type_and_default() -> None:
    """Read back from the table, against the recipe's own types."""
    tables = dict(re.findall(r"^## `(\w+)`$(.*?)(?=^## |\Z)", markdown(), re.MULTILINE | re.DOTALL))
    kinds = {f.name: f.type for f in msgspec.structs.fields(Recipe)} | {"source": Source}
    assert list(tables) == list(kinds)
    for name, kind in kinds.items():
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (required|`.+?`) \| (.+) \|$", tables[name], re.MULTILINE)
        fields = msgspec.structs.fields(kind)
        assert [row[0] for row in rows] == [f.name for f in fields]
        assert [row[2] == "required" for row in rows] == [f.required for f in fields]
        assert all(row[3].endswith(".") for row in rows)
    assert "| `max_context` | integer >= 8, <= 4,194,304 | `1024` |" in tables["model"]
    assert "| `train` | string or list of sources | required |" in tables["data"]
    assert '| `mode` | off \\| r2 \\| r3 | `"r3"` |' in tables["replay"]
