"""The engine role: one SGLang server for the run, watched, announced, and started again a limited number of times.

    life:  start ─▶ ready ─▶ join, join, … ─▶ end of the run | told to stop      (the role ends well)
                                        └──▶ the server died | quarantined ─▶ leave ─▶ next life, or the role fails

A server that dies before it was ever ready is not started again: what it complains of would not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Protocol

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Member, MemberId, RunState
from moe_asyncrl.engine.machine import EngineMachine
from moe_asyncrl.engine.server import EngineDied, Server

log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0
WATCH_S = 0.25
LEAVE_S = 5.0


class Home(Protocol):
    """The run's state, as an engine sees it. Calls are bounded and raise UserError's kin."""

    async def state(self) -> RunState:
        """The state of the run now."""
        ...

    async def join(self, member: Member) -> RunState:
        """A sign of life; the state tells the engine what it is now."""
        ...

    async def leave(self, life: MemberId, reason: str) -> None:
        """This life of the engine is over."""
        ...


@dataclasses.dataclass(frozen=True)
class Lives:
    """How an engine's lives are limited."""

    restarts: int
    """Servers started after the first one."""
    start_s: float
    """Longest start of one, in seconds."""
    heartbeat_s: float = HEARTBEAT_S


class EngineRole:
    """Runs the lives of one engine."""

    def __init__(
        self,
        name: str,
        home: Home,
        start: Callable[[], Server],
        *,
        lives: Lives,
        machine: EngineMachine,
        note: Callable[[str, float, float], None] = lambda name, start, end: None,
    ) -> None:
        """`start` starts a server and returns at once; `note(span, start, end)` records what took how long."""
        self._name = name
        self._home = home
        self._start = start
        self._lives = lives
        self._machine = machine
        self._note = note

    async def run(self, stop: asyncio.Event) -> None:
        """Live until the run is over or `stop` is set.

        Raises:
            EngineDied: the server died once more than it may. The message has its last error.
            DeadlineExceeded: a server did not start in time, or the run's state cannot be reached.
        """
        incarnation = await self._next_incarnation()
        stopping = asyncio.create_task(stop.wait())
        try:
            for life in range(self._lives.restarts + 1):
                reason = await self._live(incarnation + life, first=life == 0, stopping=stopping)
                if reason is None:
                    return
                log.warning("%s: life %d is over: %s", self._name, life, reason)
            starts = f" (started {self._lives.restarts + 1} times)" if self._lives.restarts else ""
            raise EngineDied(f"{reason}{starts}", "")
        finally:
            stopping.cancel()

    async def _next_incarnation(self) -> int:
        """Above that of a life that the run still knows, so that a role that was started again is not taken for it."""
        known = [m.incarnation for m in (await self._home.state()).members if m.name == self._name]
        return max(known, default=-1) + 1

    async def _live(self, incarnation: int, *, first: bool, stopping: asyncio.Task[bool]) -> str | None:
        """One life. Returns why it ended if another one may follow, None if the role is done."""
        server = self._start()
        life = MemberId(name=self._name, incarnation=incarnation)
        began = time.time()
        joined = False
        reason = "stopped"
        try:
            if not await self._ready(server, stopping):
                return None
            self._note("engine_start", began, time.time())
            member = self._member(server, incarnation)
            joined = True
            reason = await self._serve(server, member, stopping) or "stopped"
            return None if reason == "stopped" else reason
        except EngineDied as error:
            reason = str(error)
            if first and not joined:
                raise
            return reason
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            await asyncio.to_thread(server.stop)
            if joined:
                # If the run cannot be told, it finds out by the missing signs of life.
                with contextlib.suppress(UserError, TimeoutError):
                    await asyncio.wait_for(self._home.leave(life, reason), LEAVE_S)

    async def _ready(self, server: Server, stopping: asyncio.Task[bool]) -> bool:
        """Wait until the server answers. False if the role is to stop first."""
        waiting = asyncio.create_task(asyncio.to_thread(server.wait_ready, self._lives.start_s))
        await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            return True
        # Ends the thread too: it sees that the server is gone.
        await asyncio.to_thread(server.stop)
        await asyncio.gather(waiting, return_exceptions=True)
        return False

    async def _serve(self, server: Server, member: Member, stopping: asyncio.Task[bool]) -> str | None:
        """Announce and watch. Returns None at the end of the run, or why the server must be started anew."""
        while True:
            state = await self._home.join(member)
            if state.phase in ("finished", "failed"):
                return None
            own = next((m for m in state.members if m.id == member.id), None)
            if own is not None and own.state == "quarantined":
                return f"{self._name}: an update of its weights failed, so it starts anew"
            next_beat = time.monotonic() + self._lives.heartbeat_s
            while time.monotonic() < next_beat:
                server.check_alive()
                await asyncio.wait([stopping], timeout=WATCH_S)
                if stopping.done():
                    return None

    def _member(self, server: Server, incarnation: int) -> Member:
        return Member(
            name=self._name,
            url=server.url,
            incarnation=incarnation,
            world_size=server.args.tp,
            state="joining",
            version=-1,
            nccl=self._machine.nccl,
            heartbeat=0.0,
        )
