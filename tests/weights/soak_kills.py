"""Kills and hangs in every phase of an update: `python -m tests.weights.soak_kills`, a part of `make soak`.

Under a flow of requests to two engines: an engine is killed, or stopped, in each phase; a trainer rank, the first and
another one, is killed in each phase. After each: the update has ended in bounded time and names the cause, the engine
that is left serves the new version, no process is left of what was killed, the next life gets all weights, and every
reply is of the weights that it names. Prints a line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.engines.fixtures import EngineHouse, Key, TestEngine
from tests.engines.models import make_model
from tests.pool.pool import WorkerPool
from tests.weights.kills import (
    BOUND_S,
    ENGINE_PHASES,
    FIRST_RANK_PHASES,
    OTHER_RANK_PHASES,
    Trainer,
    fall,
    family_of,
    flow_over,
    gone,
    has_served,
    judged,
    main_pid,
    patient_pool,
    scheduler_pid,
    stop_and_go,
)
from tests.weights.mix import Mixed

GOOD = Key("qwen3_moe", 1, 1, 0)
VICTIMS = (Key("qwen3_moe", 1, 1, 1), Key("qwen3_moe", 2, 2, 0))
OTHER_RANK = 3
KINDS = ("engine-kill", "engine-hang", "first-rank", "other-rank")


def main() -> None:
    """Run, and stop at the first thing that is wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kind", choices=KINDS, action="append", help="only these")
    options.add_argument("--transport", default="broadcast", choices=("broadcast", "direct", "disk", "shared_memory"))
    options.add_argument("--phase", action="append", help="only these")
    args = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-kills-"))
    house = EngineHouse(folder)
    try:
        soak = Soak(house, folder, args.transport, args.phase)
        for kind in args.kind or KINDS:
            if kind.startswith("engine"):
                soak.engines(kind)
            else:
                soak.ranks(0 if kind == "first-rank" else OTHER_RANK)
        print(json.dumps({"name": "soak_kills", "cases": soak.cases, "longest_s": soak.longest}))
    finally:
        house.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Soak:
    """The servers, and what it came to."""

    def __init__(self, house: EngineHouse, folder: Path, transport: str, phases: list[str] | None) -> None:
        self._house, self._folder, self._phases = house, folder, phases
        self._ways = {"transport": transport, "delta": "auto"}
        self._second = make_model("qwen3_moe", folder / "second", seed=7)
        for key in (GOOD, *VICTIMS):
            house.begin(key)
        self._good = house.get(GOOD)
        self._mixed = Mixed(self._good.model, self._second)
        self._seed = 0
        self.cases = 0
        self.longest: dict[str, float] = {}

    def engines(self, kind: str) -> None:
        """One of two engines, in each phase."""
        with WorkerPool(size=4) as pool:
            for number, (phase, turn) in enumerate(self._wanted(ENGINE_PHASES)):
                victim = VICTIMS[number % len(VICTIMS)]
                with self._trainer(pool, victim) as trainer:
                    hang = kind == "engine-hang"
                    self._engine_falls(trainer, self._house.get(victim), victim, phase, turn, hang=hang)

    def ranks(self, rank: int) -> None:
        """A trainer rank, in each phase; each time the workers are new, since the others' groups end with it."""
        for phase, turn in self._wanted(OTHER_RANK_PHASES if rank else FIRST_RANK_PHASES):
            with patient_pool() as pool, self._trainer(pool, VICTIMS[0]) as trainer:
                self._rank_falls(trainer, rank, phase, turn)

    def _wanted(self, phases: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
        return [p for p in phases if self._phases is None or p[0] in self._phases]

    @contextlib.contextmanager
    def _trainer(self, pool: WorkerPool, other: Key) -> Iterator[Trainer]:
        engines = (self._good, self._house.get(other))
        for engine in engines:
            engine.reset()
        trainer = Trainer(pool, {e.name: e for e in engines}, self._second, folder=self._folder / "weights")
        trainer.start(**self._ways)
        trainer.publish(0)
        yield trainer
        trainer.stop()

    def _engine_falls(
        self, trainer: Trainer, victim: TestEngine, key: Key, phase: str, turn: int, *, hang: bool
    ) -> None:
        self._seed += 1
        good = self._good
        processes = family_of(victim)
        number, pid, group = int(signal.SIGSTOP), victim.server.pid, True
        if not hang:
            number, group = int(signal.SIGKILL), False
            pid = scheduler_pid(victim) if self._seed % 2 else main_pid(victim)
        with flow_over([good, victim], self._seed) as flow:
            for one in (good, victim):
                flow.wait(has_served(one.name, 0), 120, "replies of the first version")
            self._ready(trainer, phase)
            trainer.job("arm", rank=0, phase=phase, turn=turn, number=number, pid=pid, group=group)
            report = trainer.publish(1)
            assert report["struck"] is not None, f"{phase} {turn} never came"
            took = report["ended"] - report["struck"]
            assert report["engines"] == (good.name,) and victim.name in report["lost"], report
            assert took < BOUND_S, report
            flow.wait(has_served(good.name, 1), 60, f"version 1 from {good.name}")
            if hang:
                # As the role does with a server that is quarantined.
                stop_and_go(victim)
                time.sleep(0.5)
                victim.server.stop()
            gone(processes)
        self._house.end(key)
        judged(self._mixed, flow, good=[good.name], of_versions=[0, 1])
        again = self._house.get(key)
        trainer.new_life(again)
        report = trainer.publish(2)
        back = time.time() - report["began"]
        assert set(report["engines"]) == {good.name, again.name} and not report["lost"], report
        with flow_over([good, again], 1000 + self._seed) as flow:
            for one in (good, again):
                flow.wait(has_served(one.name, 2), 120, "replies of the third version")
        judged(self._mixed, flow, good=[good.name, again.name], of_versions=[2])
        self._say(f"{'hang' if hang else 'kill'} of {key} at {phase} {turn}", took, back)

    def _ready(self, trainer: Trainer, phase: str) -> None:
        """Groups last from update to update: only a new trainer forms them again."""
        if phase == "connect":
            trainer.start(**self._ways)

    def _say(self, what: str, took: float, back: float) -> None:
        kind = what.split(" at ")[0].split(" of ")[0]
        self.longest[kind] = round(max(self.longest.get(kind, 0.0), took), 1)
        self.cases += 1
        print(f"{what}: over after {took:.1f} s, whole again by an update of {back:.1f} s", flush=True)

    def _rank_falls(self, trainer: Trainer, rank: int, phase: str, turn: int) -> None:
        self._seed += 1
        engines = list(trainer.engines.values())
        versions = [0, 1, 2] if phase in ("commit", "resume", "settle") else [0, 2]
        with flow_over(engines, self._seed) as flow:
            for one in engines:
                flow.wait(has_served(one.name, 0), 120, "replies of the first version")
            self._ready(trainer, phase)
            fallen = fall(trainer, rank, phase, turn, 1, self._folder / "notes")
            began = time.monotonic()
            trainer.start(**self._ways)
            report = trainer.publish(2)
            assert len(report.get("engines", ())) == 2, report
            back = time.monotonic() - began
            for one in engines:
                flow.wait(has_served(one.name, 2), 120, "replies of the next trainer")
        judged(self._mixed, flow, good=[], of_versions=versions)
        said = next(iter(fallen.errors.values()))
        print(f"  rank {min(fallen.errors)} says: {said[:200]}")
        self._say(f"rank {rank} at {phase} {turn}", fallen.seconds, back)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
