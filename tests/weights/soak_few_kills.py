"""A few faults in the midst of an update, under a flow of requests; `pytest tests/weights/soak_few_kills.py`."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from tests.engines.fixtures import TestEngine
from tests.weights.kills import BOUND_S, Trainer, fall, flow_over, has_served, judged, patient_pool, stop_and_go
from tests.weights.mix import Mixed
from tests.weights.test_kills import engines_two, mixed, second, trainer

__all__ = ["engines_two", "mixed", "second", "trainer"]


def test_an_engine_that_hangs_in_a_transfer_and_a_sender_of_an_old_epoch(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], mixed: Mixed
) -> None:
    """It is left out in bounded time, and serves nothing when it wakes; the next life of it gets all weights."""
    good, bad = engines_two
    trainer.start()
    trainer.publish(0)
    with flow_over(engines_two, seed=1) as flow:
        flow.wait(has_served(bad.name, 0), 60, "replies of the first version")
        trainer.job("arm", rank=0, phase="send", turn=1, number=int(signal.SIGSTOP), pid=bad.server.pid, group=True)
        try:
            report = trainer.publish(1)
        finally:
            stop_and_go(bad)
        assert report["engines"] == (good.name,) and re.search("waited|within", report["lost"][bad.name]), report
        assert report["took"] < BOUND_S
        flow.wait(has_served(good.name, 1), 60, "replies of the second version")
        trainer.job("set_epoch", back=10**6)
        error = trainer.publish(2, fails=True)["error"]
        assert "another trainer owns the run now" in error, error
        trainer.job("set_epoch", back=-(10**6))
        trainer.new_life(bad)
        assert set(trainer.publish(2)["engines"]) == {good.name, bad.name}
        for one in engines_two:
            flow.wait(has_served(one.name, 2), 60, "replies of the third version")
    account = judged(mixed, flow, good=[good.name], of_versions=[0, 1, 2])
    woken = [r for r in flow.replies if r.engine == bad.name and 1 in r.done.versions]
    assert not woken and account.replies == len(flow.replies) - account.ties


def test_a_trainer_rank_that_dies_in_a_transfer(
    engines_two: tuple[TestEngine, TestEngine], second: Path, mixed: Mixed, tmp_path: Path
) -> None:
    """The other ranks end, and the next trainer's update makes both engines whole again."""
    trainer_engines = {e.name: e for e in engines_two}
    with patient_pool() as workers:
        trainer = Trainer(workers, trainer_engines, second)
        trainer.start()
        trainer.publish(0)
        with flow_over(engines_two, seed=3) as flow:
            for one in engines_two:
                flow.wait(has_served(one.name, 0), 60, "replies of the first version")
            began = time.monotonic()
            fallen = fall(trainer, 3, "send", 1, 1, tmp_path / "notes")
            print(f"the others ended after {fallen.seconds:.1f} s: {fallen.errors}")
            trainer.start()
            assert len(trainer.publish(2)["engines"]) == 2
            print(f"both engines serve again {time.monotonic() - began:.1f} s after the kill")
            for one in engines_two:
                flow.wait(has_served(one.name, 2), 60, "replies of the next trainer")
        judged(mixed, flow, good=[], of_versions=[0, 2])
        trainer.stop()
