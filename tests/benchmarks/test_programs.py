"""Every program in benchmarks/ starts: what it takes from the package is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PROGRAMS = sorted(path.stem for path in Path("benchmarks").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_the_programs_are_found() -> None:
    assert {"convert", "end_to_end", "long_run"} <= set(PROGRAMS)
