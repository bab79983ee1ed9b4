"""One update, seen from the trainer's first rank: prepare, pause, session, buckets, end, acknowledge, resume.

    idle ─start─▶ open ─send…─▶ open ─finish─▶ acknowledged ─resume─▶ idle
                    └────────── any failure: recover(cause) ──────────▶ idle, without the engines at fault

After a failure the weights are still on the trainer, so the update is done again from the start with the engines that
are left. An engine at fault is never resumed: it may hold parts of two versions. Every step has the same time limit.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

import torch

from moe_asyncrl.data.errors import EngineLost
from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.weights.backend import Transport
from moe_asyncrl.weights.buckets import Bucket
from moe_asyncrl.weights.failure import EnginesFailed, raise_if_any
from moe_asyncrl.weights.update_group import GRACE_S, UpdateGroup


class Updater:
    """Holds the process group from update to update, as long as the same engines are in it. For one event loop."""

    def __init__(self, *, host: str, timeout_s: float, pause_mode: str = "in_place") -> None:
        """`host`: this process's address for the engines. `timeout_s`: the longest single step, in seconds."""
        self._host = host
        self._timeout_s = timeout_s
        self._pause_mode = pause_mode
        self._tag = uuid.uuid4().hex[:8]
        self._groups_made = 0
        self._group: UpdateGroup | None = None
        self._met: list[EngineControl] = []
        self._engines: tuple[EngineControl, ...] = ()
        self._sending: asyncio.Task[None] | None = None
        self._replies: dict[str, asyncio.Task[None]] = {}
        self.paused_at: float | None = None
        """Unix time at which engines began to pause, while they are paused."""

    async def start(self, engines: Sequence[EngineControl], transport: Transport) -> None:
        """Make the group fit the membership, check that everyone answers, pause, and open the sessions.

        Raises EnginesFailed.
        """
        self._engines = tuple(engines)
        limit = self._timeout_s
        await self._each(lambda e: e.serving_version(deadline_s=limit))
        await self._close_old_sessions()
        await self._reconcile(transport)
        self.paused_at = self.paused_at or time.time()
        await self._each(lambda e: e.pause(mode=self._pause_mode, deadline_s=limit))
        await self._each(lambda e: e.begin_update(deadline_s=limit))

    async def send(self, bucket: Bucket, flat: torch.Tensor, version: int | None) -> None:
        """Broadcast one bucket and wait until every engine has loaded it. `version` goes with the last one only.

        `flat` is contiguous uint8 of `bucket.nbytes`. Raises EnginesFailed on the first engine that answers with an
        error, however far the broadcast is: the transfer is then still under way, and `recover` ends it.
        """
        if flat.dtype != torch.uint8 or flat.numel() != bucket.nbytes:
            raise ValueError(f"bucket {bucket.names} has {bucket.nbytes} bytes, not {flat.numel()} of {flat.dtype}")
        group = self._group
        if group is None:
            raise RuntimeError("no update is open")
        self._replies = {
            e.name: asyncio.create_task(
                # Longer than the broadcast's own limit, so that an engine that hangs is told from those it holds up.
                e.receive_bucket(
                    bucket.tensors, group=group.name, version=version, deadline_s=self._timeout_s + 2 * GRACE_S
                )
            )
            for e in self._engines
        }
        self._sending = asyncio.create_task(group.broadcast(flat))
        await asyncio.wait([self._sending, *self._replies.values()], return_when=asyncio.FIRST_EXCEPTION)
        failed = {name: str(error) for name, error in self._reply_errors().items()}
        if failed:
            raise EnginesFailed(failed)
        if self._sending.done() and (error := self._sending.exception()) is not None:
            raise EnginesFailed({}, f"the broadcast of {bucket.names} failed: {error}") from error
        self._sending, self._replies = None, {}

    async def finish(self, version: int) -> None:
        """Close the sessions, and have every engine say that it now has `version`. Raises EnginesFailed."""
        limit = self._timeout_s
        await self._each(lambda e: e.end_update(deadline_s=limit))

        async def acknowledge(engine: EngineControl) -> None:
            got = await engine.serving_version(deadline_s=limit)
            if got != version:
                raise ValueError(f"reports weight version {got} after the update to {version}")

        await self._each(acknowledge)

    async def resume(self) -> dict[str, str]:
        """Let all engines go on. Returns the reasons of those that did not answer."""
        try:
            await self._each(lambda e: e.resume(deadline_s=self._timeout_s))
        except EnginesFailed as failure:
            return failure.lost
        finally:
            self.paused_at = None
        return {}

    async def recover(self, cause: EnginesFailed) -> dict[str, str]:
        """Call off what is under way and free the engines that are not at fault. Returns those at fault, with reasons.

        Engines that are dead are at fault before engines that complain: when one dies inside a collective, its
        neighbours complain as well. What is returned may be empty if nobody is to blame; then the same engines may
        try again.
        """
        accused = dict(cause.lost)
        group, self._group = self._group, None
        by_name = {e.name: e for e in self._engines}
        if self._sending is not None and group is not None:
            # A refusing engine that leaves closes its connections, which ends the broadcast that waits for it.
            await group.leave([by_name[name] for name in accused if name in by_name])
            await asyncio.wait([self._sending], timeout=self._timeout_s + GRACE_S if accused else GRACE_S)
        if group is not None:
            group.abandon()
        stuck = await self._drain()
        dead = {**stuck, **{n: str(e) for n, e in self._reply_errors().items() if isinstance(e, EngineLost)}}
        dead |= await self._outcome([e for e in self._engines if e.name not in dead], _probe)
        lost = dead or accused
        self._sending, self._replies = None, {}
        survivors = [e for e in self._engines if e.name not in lost]

        async def release(engine: EngineControl) -> None:
            await self._end_session(engine)
            if group is not None and engine.name not in accused:
                await group.leave([engine])

        lost |= await self._outcome(survivors, release)
        self._met = [e for e in self._met if e.name not in lost]
        return lost

    async def close(self) -> None:
        """Drop the group on all sides."""
        if self._group is not None:
            await self._group.dissolve(self._group.engines)
            self._group = None

    async def _close_old_sessions(self) -> None:
        """A trainer that was killed may have left a session open: an engine met for the first time ends it."""
        new = [e for e in self._engines if e not in self._met]
        raise_if_any(await self._outcome(new, self._end_session))
        self._met = list(self._engines)

    async def _end_session(self, engine: EngineControl) -> None:
        try:
            await engine.end_update(deadline_s=self._timeout_s)
        except EngineLost:
            raise
        except Exception:
            # It says that no session is open, which is what is wanted. Anything worse shows when one is opened.
            return

    async def _reconcile(self, transport: Transport) -> None:
        if self._group is not None:
            if self._group.engines == self._engines and self._group.transport == transport:
                return
            group, self._group = self._group, None
            await group.dissolve(self._engines)
        self._groups_made += 1
        self._group = await UpdateGroup.form(
            self._engines,
            name=f"weights-{self._tag}-{self._groups_made}",
            host=self._host,
            transport=transport,
            timeout_s=self._timeout_s,
        )

    async def _drain(self) -> dict[str, str]:
        """Wait a little for what is under way; the engines that do not come out of it."""
        if self._replies:
            await asyncio.wait(self._replies.values(), timeout=GRACE_S)
        stuck = {}
        for name, task in self._replies.items():
            if not task.done():
                stuck[name] = f"did not come out of the update within {GRACE_S:g} s"
                task.cancel()
        if self._sending is not None and not self._sending.done():
            self._sending.cancel()
        elif self._sending is not None:
            self._sending.exception()
        return stuck

    def _reply_errors(self) -> dict[str, BaseException]:
        errors = {}
        for name, task in self._replies.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                errors[name] = error
        return errors

    async def _each(self, call: Callable[[EngineControl], Awaitable[object]]) -> None:
        raise_if_any(await self._outcome(self._engines, call))

    async def _outcome(
        self, engines: Sequence[EngineControl], call: Callable[[EngineControl], Awaitable[object]]
    ) -> dict[str, str]:
        results = await asyncio.gather(*(call(e) for e in engines), return_exceptions=True)
        pairs = zip(engines, results, strict=True)
        return {e.name: str(r) or repr(r) for e, r in pairs if isinstance(r, BaseException)}


async def _probe(engine: EngineControl) -> None:
    await engine.serving_version(deadline_s=GRACE_S)
