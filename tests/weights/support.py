"""What the update tests share: the run's state in memory, and clients that provoke one fault in a real engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_asyncrl.data.messages import Counters, Member, MemberId, RunState
from moe_asyncrl.data.weights import Progress
from moe_asyncrl.engine.client import EngineClient

UPDATE_S = 20.0
"""Time limit of one step of an update in these tests."""


def member(name: str, url: str, *, incarnation: int = 0, world_size: int = 1) -> Member:
    """An engine that wants weights."""
    return Member(
        name=name,
        url=url,
        incarnation=incarnation,
        world_size=world_size,
        state="joining",
        version=-1,
        heartbeat=0.0,
    )


@dataclass
class MemoryControl:
    """`RunControl` without a buffer process: what was committed, and who is there."""

    members: list[Member]
    commits: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)

    def state(self) -> RunState:
        return RunState(
            request=0,
            phase="running",
            error=None,
            epoch=1,
            version=self.commits[-1][0] if self.commits else -1,
            step=0,
            members=tuple(self.members),
            held=0,
            capacity=0,
            issued=0,
            counters=Counters(),
        )

    def commit(self, version: int, members: Sequence[MemberId], lost: Sequence[MemberId]) -> None:
        self.commits.append((version, tuple(m.name for m in members), tuple(m.name for m in lost)))


class RefusingClient(EngineClient):
    """Is not paused, so that the engine itself refuses what comes while the trainer sends it."""

    async def pause(self, *, mode: str, deadline_s: float) -> None:
        return


class AbsentClient(EngineClient):
    """Never comes to the rendezvous."""

    async def join_group(self, **arguments: Any) -> None:
        await asyncio.sleep(3600)


class LyingClient(EngineClient):
    """Says that it holds something else than was sent."""

    async def finish(self, update: str, *, deadline_s: float) -> str:
        return (await super().finish(update, deadline_s=deadline_s))[::-1]


class DyingClient(EngineClient):
    """Kills the engine while weights are on their way. `pid` leads the server's process group."""

    def __init__(self, url: str, *, pid: int, name: str) -> None:
        super().__init__(url, name=name)
        self._pid = pid

    async def receive(self, update: str, count: int, *, deadline_s: float) -> Progress:
        if self._pid:
            await super().receive(update, 1, deadline_s=deadline_s)
            os.killpg(self._pid, signal.SIGKILL)
            self._pid = 0
        return await super().receive(update, count, deadline_s=deadline_s)


class SlowToStartClient(EngineClient):
    """Comes to the rendezvous later than the others."""

    async def join_group(self, **arguments: Any) -> None:
        await asyncio.sleep(1.0)
        await super().join_group(**arguments)


def make_client(kind: str, target: Member, pid: int) -> EngineClient:
    """A client of the wanted kind; `plain` is the real one."""
    if kind == "dying":
        return DyingClient(target.url, pid=pid, name=target.name)
    kinds = {
        "plain": EngineClient,
        "refusing": RefusingClient,
        "absent": AbsentClient,
        "lying": LyingClient,
        "slow": SlowToStartClient,
    }
    return kinds[kind](target.url, name=target.name, world_size=target.world_size)
