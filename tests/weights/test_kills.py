"""A few faults in the midst of an update, under a flow of requests; all of them in `tests/weights/soak_kills.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fixtures import TestEngine
from tests.pool.pool import WorkerPool
from tests.weights.kills import Trainer, flow_over, has_served, judged
from tests.weights.mix import Mixed
from tests.weights.test_publish import engines_two
from tests.weights.test_storm import second

__all__ = ["engines_two", "second"]


@pytest.fixture
def mixed(engines_two: tuple[TestEngine, TestEngine], second: Path) -> Mixed:
    return Mixed(engines_two[0].model, second)


@pytest.fixture
def trainer(pool: WorkerPool, engines_two: tuple[TestEngine, TestEngine], second: Path) -> Iterator[Trainer]:
    """On the session's workers, since no rank dies."""
    made = Trainer(pool, {e.name: e for e in engines_two}, second)
    yield made
    made.stop()


def test_a_flipped_bit_is_not_the_engines_fault(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], mixed: Mixed
) -> None:
    """Nobody but the only engine could serve: it refuses the message, and gets the update whole in the same call."""
    only, other = engines_two
    del trainer.engines[other.name]
    trainer.start()
    trainer.publish(0)
    with flow_over([only], seed=2) as flow:
        flow.wait(has_served(only.name, 0), 60, "replies of the first version")
        trainer.job("flip_bit", rank=1, number=1)
        report = trainer.publish(1)
        assert report["engines"] == (only.name,) and not report["lost"], report
        flow.wait(has_served(only.name, 1), 60, "replies of the second version")
    assert flow.failures and all("from trainer rank 1 is damaged on its way" in f.text for f in flow.failures)
    judged(mixed, flow, good=[], of_versions=[0, 1])
