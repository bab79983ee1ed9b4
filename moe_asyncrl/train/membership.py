"""Which engines an update is for, as the run's state says, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.data.messages import Member, MemberId, RunState
from moe_asyncrl.data.protocols import EngineControl

POLL_S = 0.2
SLICE_S = 2.0
"""Longest time that the other ranks wait for word from the first one while it waits for engines."""
RETURN_S = 15.0
"""After all engines failed: how long one may take to be seen leaving, before it counts as alive and unwilling."""


class RunControl(Protocol):
    """What an update needs of the run's state. Calls are bounded and raise UserError's kin."""

    def state(self) -> RunState:
        """The state of the run now."""
        ...

    def commit(self, version: int, members: Sequence[MemberId], lost: Sequence[MemberId]) -> None:
        """`version` is on `members`; `lost` must serve nothing more."""
        ...


class Membership:
    """Waits for engines, keeps one client for each life of each, and remembers whom an update lost."""

    def __init__(
        self, control: RunControl, connect: Callable[[Member], EngineControl], expected: int, timeout_s: float
    ) -> None:
        """`expected`: engines that the first update waits for. `timeout_s`: longest wait for them, in seconds."""
        self._control = control
        self._connect = connect
        self._expected = expected
        self._timeout_s = timeout_s
        self._clients: dict[MemberId, EngineControl] = {}
        self._lost: dict[MemberId, str] = {}
        self._waiting_since: float | None = None

    def poll(self) -> tuple[Member, ...]:
        """The engines to update, by name; empty after a short time if there are none yet.

        Raises:
            DeadlineExceeded: none came within the time limit.
            UserError: all engines failed and none of them is starting again.
        """
        began = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = began
        while True:
            members = self._control.state().members
            able = tuple(sorted((m for m in members if self._may_serve(m)), key=lambda m: m.name))
            waited = time.monotonic() - self._waiting_since
            if len(able) >= self._expected or (able and waited > self._timeout_s):
                self._waiting_since = None
                self._expected = 1
                return able
            if not able:
                self._check_hope(members, waited)
            if time.monotonic() - began > SLICE_S:
                return ()
            time.sleep(POLL_S)

    async def clients(self, members: Sequence[Member]) -> tuple[EngineControl, ...]:
        """The client of each member; those of lives that are over are closed."""
        wanted = {member.id: member for member in members}
        for gone in [life for life in self._clients if life not in wanted]:
            await _close(self._clients.pop(gone))
        for life, member in wanted.items():
            if life not in self._clients:
                self._clients[life] = self._connect(member)
        return tuple(self._clients[member.id] for member in members)

    def lose(self, members: Sequence[Member], lost: Mapping[str, str]) -> None:
        """Leave these out until they come back with another life."""
        for member in members:
            if member.name in lost:
                self._lost[member.id] = lost[member.name]

    def commit(self, version: int, members: Sequence[Member]) -> None:
        """Tell the run that `members` have `version`, and whom updates have lost."""
        self._control.commit(version, [m.id for m in members], list(self._lost))

    async def close(self) -> None:
        """Close all clients."""
        for life in list(self._clients):
            await _close(self._clients.pop(life))

    def _may_serve(self, member: Member) -> bool:
        return member.state != "quarantined" and member.id not in self._lost

    def _check_hope(self, members: Sequence[Member], waited: float) -> None:
        unwilling = {m.name: self._lost[m.id] for m in members if m.id in self._lost}
        if unwilling and len(unwilling) == len(members) and waited > RETURN_S:
            raise UserError("no engine is left: " + "; ".join(unwilling.values()))
        if waited > self._timeout_s:
            reasons = "; ".join(self._lost.values())
            raise DeadlineExceeded(
                f"waited {self._timeout_s:g} s for an engine to take part in a weight update; none is there"
                + (f" (lost before: {reasons})" if reasons else "")
            )


async def _close(client: EngineControl) -> None:
    close = getattr(client, "close", None)
    if close is not None:
        await close()
