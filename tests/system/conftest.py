"""What the tests of whole runs share. Each of them starts commands in a user's folder outside the repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.chain import Chain
from tests.system.projects import make_model
from tests.system.user_run import Done, user_run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF directory that nobody changes."""
    return make_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="package")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A user's whole run, watched while it ran."""
    return user_run(tmp_path_factory.mktemp("user") / "mine")


@pytest.fixture(scope="package", autouse=True)
def chain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_model: Path
) -> Iterator[Chain | None]:
    """The run that is broken off again and again. It begins with the first test here, as its tests come last."""
    if not any("test_whole_run_broken_off" in item.nodeid for item in request.session.items):
        yield None
        return
    running = Chain(tmp_path_factory.mktemp("chain") / "mine", small_model)
    yield running
    running.close()
