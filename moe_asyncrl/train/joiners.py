"""Engines that come while the trainer trains get the committed weights from one that serves, without the trainer.

A task beside the trainer's first rank looks at who is there. A newcomer gets its weights from an engine of the same
layout, rank to rank, or from the newest folder where updates go over the disk; then it is committed as a member. Where
neither can be had, it waits for the next update. No engine is ever in two updates: the task and the trainer's own
updates exclude each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec

from moe_asyncrl.data.errors import StaleEpoch, UserError
from moe_asyncrl.data.messages import Member, MemberId
from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.data.weights import Prepare
from moe_asyncrl.train.membership import RunControl
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.message_files import newest, read_index

LOOK_S = 1.0
"""Between two looks at who has come."""
AT_ONCE = 8


class CopyWeights(Protocol):
    """Brings one engine to what another one serves; leaves the target running. Raises UserError's kin."""

    async def __call__(self, source: Member, target: Member, /) -> None: ...


class Joiners:
    """On the trainer's first rank. `rest` before an update, `go_on` after it."""

    def __init__(
        self,
        loop: LoopThread,
        control: RunControl,
        connect: Callable[[Member], EngineControl],
        copy: CopyWeights | None,
        *,
        layout_of: Callable[[Member], EngineLayout],
        timeout_s: float,
        folder: Path | None = None,
        note: Callable[..., None] = lambda name, start, **extra: None,
    ) -> None:
        """`control`: not that of another thread. `copy`: None where engines cannot copy. `folder`: of `disk`."""
        self._loop, self._control, self._connect, self._copy = loop, control, connect, copy
        self._layout_of, self._timeout_s, self._folder, self._note = layout_of, timeout_s, folder, note
        self._busy = asyncio.Lock()
        self._version: int | None = None
        self._members: dict[MemberId, Member] = {}
        self._manifests: dict[str, str] = {}
        self._failed: dict[MemberId, str] = {}
        self._task: Future[None] = loop.submit(self._watch())

    def rest(self) -> dict[str, str]:
        """Wait for a newcomer that is on its way (each of its steps has a deadline), and let no other one begin.

        Returns the manifests of those that hold the committed version, by name.
        """
        self._loop.call(self._busy.acquire())
        return dict(self._manifests)

    def go_on(self, version: int | None, members: Sequence[Member], manifests: dict[str, str]) -> None:
        """`version` is committed on `members`; None: nothing is, and nobody can be served."""
        self._version, self._members, self._manifests = version, {m.id: m for m in members}, dict(manifests)
        self._loop.call(self._release())

    def close(self) -> None:
        """End the task."""
        self._task.cancel()

    async def _release(self) -> None:
        self._busy.release()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            # A run that is over, or a buffer that does not answer, is for the trainer's own thread to find out.
            with contextlib.suppress(UserError):
                async with self._busy:
                    if self._version is not None and self._members:
                        await self._look(self._version)

    async def _look(self, version: int) -> None:
        state = await asyncio.to_thread(self._control.state)
        there = {m.id: m for m in state.members if m.state != "quarantined"}
        self._members = {life: m for life, m in self._members.items() if life in there}
        new = [m for life, m in there.items() if life not in self._members and life not in self._failed]
        for member in sorted(new, key=lambda m: m.name):
            began = time.time()
            try:
                manifest = await self._serve(member, version)
            except (UserError, StaleEpoch) as error:
                # At the next update it is tried again; an engine that is broken by it then gets all weights.
                self._failed[member.id] = str(error)
                self._note("join_failed", began, engine=member.name, reason=str(error))
                continue
            if manifest is None:
                continue
            self._members[member.id] = member
            self._manifests[member.name] = manifest
            await asyncio.to_thread(self._control.commit, version, list(self._members), [])
            self._note("joined", began, time.time(), engine=member.name, version=version)

    async def _serve(self, member: Member, version: int) -> str | None:
        """Bring one engine to the committed version. Returns its manifest; None if nobody can give it."""
        layout = self._layout_of(member)
        peers = [m for m in self._members.values() if self._layout_of(m) == layout]
        engine = self._connect(member)
        try:
            held = await engine.hold(deadline_s=self._timeout_s)
            if held.state != "serving":
                return None
            folder = newest(self._folder, version) if self._folder is not None else None
            if peers and self._copy is not None:
                await self._copy(peers[0], member)
            elif folder is not None:
                await self._from_folder(engine, folder)
            else:
                return None
            return (await engine.hold(deadline_s=self._timeout_s)).manifest
        finally:
            close = getattr(engine, "close", None)
            if close is not None:
                await close()

    async def _from_folder(self, engine: EngineControl, folder: Path) -> None:
        index = await asyncio.to_thread(read_index, folder)
        update = f"{folder.name}-{uuid.uuid4().hex[:8]}"
        limit = self._timeout_s
        order = Prepare(
            update=update,
            epoch=index.epoch,
            version=index.version,
            transport="disk",
            streams=tuple(msgspec.structs.replace(s, channel=str(folder)) for s in index.streams),
            schedules=index.schedules,
            wait_s=limit,
        )
        await engine.prepare(order, deadline_s=limit)
        await engine.pause(mode="retract", deadline_s=limit)
        try:
            while (await engine.receive(update, AT_ONCE, deadline_s=2 * limit)).left:
                pass
            await engine.finish(update, deadline_s=limit)
            await engine.commit(update, version=index.version, manifest=index.manifest, deadline_s=limit)
        except BaseException:
            with contextlib.suppress(Exception):
                await engine.abandon(update, reason="its weights could not be read from the disk", deadline_s=limit)
            raise
        await engine.resume(deadline_s=limit)
