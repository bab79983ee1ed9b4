"""What the update tests share: the run's state in memory, and clients that provoke one fault in a real engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_asyncrl.data.messages import Counters, Member, MemberId, RunState
from moe_asyncrl.data.protocols import TensorMeta
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
    """Opens no session, so that the engine itself refuses every bucket while the trainer broadcasts it."""

    async def begin_update(self, *, deadline_s: float) -> None:
        return


class AbsentClient(EngineClient):
    """Never comes to the rendezvous."""

    async def join_group(self, **arguments: Any) -> None:
        await asyncio.sleep(3600)


class LyingClient(EngineClient):
    """Takes the weights and keeps their version from the engine, which then reports another one."""

    async def receive_bucket(
        self, tensors: Sequence[TensorMeta], *, group: str, version: int | None, deadline_s: float
    ) -> None:
        await super().receive_bucket(tensors, group=group, version=None, deadline_s=deadline_s)


class DyingClient(EngineClient):
    """Kills the engine when the second bucket is on its way. `pid` leads the server's process group."""

    def __init__(self, url: str, *, pid: int, name: str) -> None:
        super().__init__(url, name=name)
        self._pid = pid
        self._buckets = 0

    async def receive_bucket(
        self, tensors: Sequence[TensorMeta], *, group: str, version: int | None, deadline_s: float
    ) -> None:
        self._buckets += 1
        if self._buckets == 2:
            os.killpg(self._pid, signal.SIGKILL)
        await super().receive_bucket(tensors, group=group, version=version, deadline_s=deadline_s)


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
