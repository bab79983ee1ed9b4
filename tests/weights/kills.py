"""Kills and hangs in each phase of an update, under a flow of requests: what is done, and what must be true after it.

Trainer ranks that are to die are not those of the session's pool: their process groups, and those of whoever shares
them, end with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_asyncrl.data.messages import Member
from tests.engines.fixtures import TestEngine
from tests.pool import pool as pools
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.weights.flow import Flow
from tests.weights.mix import Mixed
from tests.weights.storm import Account, check_replies
from tests.weights.support import member
from tests.weights.test_publish import EP2_PP2

STEP_S = 5.0
"""The recipe's time limit of one step."""
BOUND_S = 6 * STEP_S + 20
"""An update in which something dies or hangs: the step's limit, the grace of those that have to come out of it, and
the second attempt (on a machine that others use, too)."""
GONE_S = 15.0
"""Until no process of a killed engine or trainer is left."""
LENGTHS = (3, 10, 30)
ENGINE_PHASES = (
    ("survey", 0),
    ("connect", 0),
    ("prepare", 0),
    ("pause", 0),
    ("transfer", 0),
    ("send", 1),
    ("finish", 0),
    ("commit", 0),
    ("resume", 0),
)
"""As the first trainer rank goes through them; `connect`: the group is being formed; `transfer`: engines are paused."""
FIRST_RANK_PHASES = (*ENGINE_PHASES, ("settle", 0))
OTHER_RANK_PHASES = (("plan", 0), ("connect", 0), ("announce", 0), ("open", 0), ("send", 0), ("send", 1), ("settle", 0))


@dataclass
class Trainer:
    """Four ranks whose weights are those of a version."""

    pool: WorkerPool
    engines: dict[str, TestEngine]
    second: Path
    folder: Path | None = None
    """For files of `disk`"""
    lives: dict[str, int] = field(default_factory=dict)

    def job(self, name: str, *, module: str = "kill_jobs", **arguments: Any) -> list[Any]:
        return self.pool.run(f"tests.weights.{module}:{name}", layout=EP2_PP2, timeout_s=180, **arguments)

    def members(self) -> list[Member]:
        """The engines, each in its present life."""
        return [
            member(e.name, e.url, world_size=e.world_size, incarnation=self.lives.get(e.name, 0))
            for e in self.engines.values()
        ]

    def start(self, **weights: Any) -> None:
        self.job(
            "start",
            module="jobs",
            hf_dir=str(next(iter(self.engines.values())).model),
            members=self.members(),
            weights=weights,
            folder=None if self.folder is None else str(self.folder),
            step_s=STEP_S,
            bucket_bytes=1 << 16,
        )
        self.job("hold_two", module="storm_jobs", second=str(self.second))

    def stop(self) -> None:
        self.job("stop", module="jobs")

    def publish(self, version: int, notes: Path | None = None, *, fails: bool = False) -> dict[str, Any]:
        """The first rank's report; all ranks' are equal. `fails`: it must end in an error."""
        reports = self.job("publish_version", version=version, notes=None if notes is None else str(notes))
        outcomes = [(r.get("error"), r.get("engines")) for r in reports]
        assert len(set(outcomes)) == 1 and (outcomes[0][0] is not None) == fails, outcomes
        return dict(reports[0])

    def new_life(self, engine: TestEngine) -> None:
        """The engine comes as one that has started anew."""
        self.engines[engine.name] = engine
        self.lives[engine.name] = self.lives.get(engine.name, 0) + 1
        self.job("set_members", module="jobs", members=self.members())


def family_of(engine: TestEngine) -> list[psutil.Process]:
    """Every process of a server."""
    leader = psutil.Process(engine.server.pid)
    return [leader, *leader.children(recursive=True)]


def main_pid(engine: TestEngine) -> int:
    """Of SGLang's main process, below the guard."""
    return int(psutil.Process(engine.server.pid).children()[0].pid)


def scheduler_pid(engine: TestEngine) -> int:
    """Of a process that holds weights."""
    found = psutil.Process(main_pid(engine)).children(recursive=True)
    return int(max(found, key=lambda p: p.memory_info().rss).pid)


def gone(processes: Sequence[psutil.Process]) -> float:
    """Seconds until none of them is left; they have to go."""
    began = time.monotonic()
    _, alive = psutil.wait_procs(list(processes), timeout=GONE_S)
    assert not alive, f"still there after {GONE_S:g} s: {alive}"
    return time.monotonic() - began


def flow_over(engines: Sequence[TestEngine], seed: int) -> Flow:
    return Flow(engines, slots=4, seed=seed, lengths=LENGTHS, deadline_s=60.0)


def judged(mixed: Mixed, flow: Flow, *, good: Sequence[str], of_versions: Sequence[int]) -> Account:
    """All replies are whole; engines that nothing befell served the newest version.

    Those may answer that their weights are not whole: in a transfer that was called off. Then the pool asks another.
    """
    allowed = set(of_versions)
    for reply in flow.replies:
        assert set(reply.done.versions.tolist()) <= allowed, (reply, allowed)
    bad = [f for f in flow.failures if f.engine in good and "weights are not whole" not in f.text]
    assert not bad, bad[:2]
    account = check_replies(mixed, flow.replies, keep=True)
    for name in good:
        newest = [r for r in flow.replies if r.engine == name and int(r.done.versions[-1]) == max(allowed)]
        assert newest, f"{name} has not served version {max(allowed)}"
    return account


def has_served(name: str, version: int, count: int = 3) -> Callable[[Flow], bool]:
    """For `Flow.wait`: an engine has answered with a version."""
    return lambda f: sum(r.engine == name and int(r.done.versions[0]) == version for r in f.replies) >= count


@contextlib.contextmanager
def patient_pool(size: int = 4) -> Iterator[WorkerPool]:
    """A pool that waits for the ranks that are left when one has died: how they end is what is tested."""
    with pytest.MonkeyPatch.context() as patch, WorkerPool(size=size) as workers:
        patch.setattr(pools, "GRACE_S", BOUND_S)
        yield workers


@dataclass(frozen=True)
class Fallen:
    """How an update ended in which a trainer rank died."""

    seconds: float
    """Until the last of the others had ended it"""
    errors: dict[int, str]


def fall(trainer: Trainer, rank: int, phase: str, turn: int, version: int, notes: Path) -> Fallen:
    """Publish, and have a rank killed at a phase. No other rank takes the update for done.

    Those that wait in a collective for the dead one end at its time limit; a run's supervisor, here the pool, ends them
    before. Says when those that ended by themselves did.
    """
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    pids = trainer.job("pids")
    processes = [psutil.Process(pid) for pid in pids]
    trainer.job("arm", rank=rank, phase=phase, turn=turn, number=int(signal.SIGKILL))
    try:
        trainer.publish(version, notes)
    except WorkerFailed as error:
        assert f"rank {rank} failed:\nthe process died" in str(error), str(error)[:2000]
    else:
        raise AssertionError(f"rank {rank} was not killed at {phase} {turn}")
    found = {int(p.stem[5:]): json.loads(p.read_text()) for p in notes.iterdir()}
    assert rank not in found, sorted(found)
    assert all("error" in outcome for outcome in found.values()), found
    seconds = max((outcome["ended"] - outcome["began"] for outcome in found.values()), default=0.0)
    assert seconds < BOUND_S, found
    gone(processes)
    return Fallen(seconds, {rank: outcome["error"] for rank, outcome in found.items()})


def stop_and_go(engine: TestEngine) -> None:
    """End a hang."""
    os.killpg(engine.server.pid, signal.SIGCONT)
