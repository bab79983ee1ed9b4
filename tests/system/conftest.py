"""What the tests of whole runs share. Each of them starts commands in a user's folder outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.projects import make_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF directory that nobody changes."""
    return make_model(tmp_path_factory.mktemp("small") / "model")
