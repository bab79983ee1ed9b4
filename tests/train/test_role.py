"""The role's own process: signals, and what it says when its surroundings are wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_asyncrl.config.recipe import Data, Model, Recipe, Trainer
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train.build import layout_of
from moe_asyncrl.train.passes import check_supported
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


def test_expert_tensor_parallelism_follows_tp_unless_given() -> None:
    assert layout_of(Trainer(tp=2)).etp == 2
    assert layout_of(Trainer(tp=2, ep=2, etp=1)).etp == 1


def test_context_parallelism_is_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"trainer\.cp above 1"):
        check_supported(layout_of(Trainer(cp=2)))
