"""The process groups of the senders, on the first rank: kept from update to update while the same engines are there."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.weights.backend import Transport as Backend
from moe_asyncrl.weights.failure import EnginesFailed
from moe_asyncrl.weights.group import Meeting, group_name, leave
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.orders import Answer, AnyOrder, Connect, Drop
from moe_asyncrl.weights.plan import Plan
from moe_asyncrl.weights.rank_side import group_members

Command = Callable[[AnyOrder], Sequence[Answer]]
"""Has all ranks carry out an order; all their answers, by rank. Raises UserError for a problem of any of them."""


class Channels:
    """Names of the groups by sender. Groups are formed one after the other, in the order of their senders."""

    def __init__(self, loop: LoopThread, command: Command, *, host: str, timeout_s: float) -> None:
        self._loop, self._command = loop, command
        self._host, self._timeout_s = host, timeout_s
        self._tag = uuid.uuid4().hex[:8]
        self._made = 0
        self._names: dict[int, str] = {}
        self._members: dict[int, tuple[EngineControl, ...]] = {}
        self._left: dict[str, tuple[EngineControl, ...]] = {}
        self._key: object = None

    def ensure(self, plan: Plan, engines: Sequence[EngineControl], backend: Backend) -> dict[int, str]:
        """A group for each sender of the plan, with the engines that it sends to; by sender.

        Raises EnginesFailed: an engine did not come; no group is left then.
        """
        wanted = {sender: tuple(engines[n] for n in group_members(plan, sender)[0]) for sender in plan.senders}
        key = (backend, {sender: tuple(map(id, members)) for sender, members in wanted.items()})
        if key == self._key:
            return self._names
        self.drop(engines)
        try:
            for sender, members in wanted.items():
                self._form(sender, members, backend)
        except EnginesFailed:
            self.drop(engines)
            raise
        self._key = key
        return self._names

    def drop(self, engines: Sequence[EngineControl]) -> None:
        """Leave all groups, here and on those of `engines` that are in them."""
        self.abandon()
        self.leave(engines)

    def abandon(self) -> None:
        """Leave all groups here: engines that wait in a collective come out of it."""
        self._key = None
        if self._names:
            self._left = {name: self._members[sender] for sender, name in self._names.items()}
            self._names, self._members = {}, {}
            self._command(Drop())

    def leave(self, engines: Sequence[EngineControl]) -> None:
        """Have `engines` leave the groups that were abandoned."""
        left, self._left = self._left, {}
        for name, members in left.items():
            self._loop.call(leave([e for e in engines if e in members], name))

    async def left_by(self, engines: Sequence[EngineControl]) -> None:
        """Have some engines leave their groups while others are still in them."""
        for sender, name in list(self._names.items()):
            await leave([e for e in engines if e in self._members[sender]], name)

    def close(self) -> None:
        """At the end, when every rank drops its groups by itself: have all engines leave."""
        self._left |= {name: self._members[sender] for sender, name in self._names.items()}
        self._names, self._members, self._key = {}, {}, None
        self.leave(list({id(engine): engine for members in self._left.values() for engine in members}.values()))

    def _form(self, sender: int, members: Sequence[EngineControl], backend: Backend) -> None:
        self._made += 1
        name = group_name(f"weights-{self._tag}-{self._made}", self._timeout_s)
        meeting = self._loop.call(
            Meeting.open(members, name=name, host=self._host, backend=backend, timeout_s=self._timeout_s)
        )
        self._names[sender], self._members[sender] = name, tuple(members)
        failed = next((a.failed for a in self._command(Connect(sender=sender, at=meeting.rendezvous)) if a.failed), "")
        if failed:
            raise self._loop.call(meeting.call_off(EnginesFailed({}, failed)))
        self._loop.call(meeting.finish())
