"""The role's own process: signals, and what it says when its surroundings are wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_asyncrl.config.recipe import Data, Model, Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.role import StopFlag, train


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_does_not_interrupt(number: signal.Signals) -> None:
    stop = StopFlag()
    assert not stop()
    os.kill(os.getpid(), number)
    assert stop()


def test_without_its_environment_the_role_says_which_variable_is_missing(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(path=str(tmp_path)), data=Data(train="t.jsonl"))
    with ExitStack() as resources, pytest.raises(UserError, match="environment variable RANK is not set"):
        train(RunFolder(tmp_path), recipe, 0, {}, lambda: False, resources)
