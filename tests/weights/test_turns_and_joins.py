"""Engines that sleep in the trainer's turn, and one that comes late and reads a folder; values against transformers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_asyncrl.data.weights import Hold
from moe_asyncrl.engine.completion import Completion
from tests.engines.fixtures import TestEngine
from tests.engines.models import Reference
from tests.weights.test_publish import TOLERANCE, Trainer, deviation, engines_two, members_of, sample, trainer

__all__ = ["engines_two", "trainer"]


def holds(one: TestEngine) -> Hold:
    """What the engine says of itself."""

    async def ask() -> Hold:
        async with one.client() as client:
            return await client.hold(deadline_s=20)

    return asyncio.run(ask())


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_colocated_engines_sleep_while_the_trainer_trains(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], tmp_path: Path, transport: str
) -> None:
    """Two turns each. What is asked in the trainer's turn waits, and is answered by the next weights."""
    first = engines_two[0]
    trainer(
        "start",
        hf_dir=str(first.model),
        members=members_of(engines_two),
        weights={"interrupt": "retract", "delta": "off", "transport": transport},
        colocated=True,
        folder=str(tmp_path / "weights"),
    )
    trainer("publish", version=0)
    for version in (1, 2):
        # A turn lasts until the next update: whoever rests twice has missed it.
        assert set(trainer("rest")) == {""}
        (error,) = set(trainer("rest"))
        assert "cannot send the engines to sleep now: it is the turn of the trainer" in error
        for one in engines_two:
            assert (holds(one).state, holds(one).released) == ("asleep", ("weights", "cache"))
        waiting: dict[str, list[Completion]] = {}

        def ask(one: TestEngine, version: int = version, waiting: dict[str, list[Completion]] = waiting) -> None:
            waiting[one.name] = sample(one, version)

        threads = [threading.Thread(target=ask, args=(one,)) for one in engines_two]
        for thread in threads:
            thread.start()
        trainer("perturb", step=version)
        assert not waiting
        report = trainer("publish", version=version)[0]
        assert len(report["engines"]) == 2 and not report["lost"] and report["transport"] == transport, report
        for thread in threads:
            thread.join(60)
        trainer("export", out=str(tmp_path / f"v{version}"))
        reference = Reference(tmp_path / f"v{version}")
        for one in engines_two:
            assert {v for c in waiting[one.name] for v in c.versions.tolist()} == {version}
            assert (holds(one).state, holds(one).released, holds(one).version) == ("serving", (), version)
            assert deviation(one, reference, version) <= TOLERANCE


def test_an_engine_of_another_layout_that_comes_late_reads_the_newest_folder(
    trainer: Trainer,
    engines_two: tuple[TestEngine, TestEngine],
    engine: Callable[..., TestEngine],
    tmp_path: Path,
) -> None:
    """Nobody could copy to it rank by rank. The trainer does nothing for it, and then sends changes to both."""
    good, late = engines_two
    trainer(
        "start",
        hf_dir=str(good.model),
        members=members_of([good]),
        joiners=True,
        weights={"transport": "disk", "delta": "auto"},
        folder=str(tmp_path / "weights"),
    )
    trainer("perturb", step=1)
    trainer("publish", version=0)
    trainer("set_members", members=members_of(engines_two))
    (commits,) = [c for c in trainer("wait_for_commits", count=2) if c]
    assert commits[-1] == (0, tuple(sorted((good.name, late.name))), ())
    trainer("export", out=str(tmp_path / "v0"))
    assert max(deviation(one, Reference(tmp_path / "v0"), 0) for one in engines_two) <= TOLERANCE
    assert holds(good).manifest == holds(late).manifest
    trainer("nudge", step=2)
    report = trainer("publish", version=1)[0]
    assert report["delta"] and len(report["engines"]) == 2 and not report["lost"], report
    trainer("export", out=str(tmp_path / "v1"))
    assert max(deviation(one, Reference(tmp_path / "v1"), 1) for one in engines_two) <= TOLERANCE
