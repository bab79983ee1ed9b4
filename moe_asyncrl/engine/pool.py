"""Several engines as one: spreads groups, takes an engine out when it fails and back when it answers again.

A group goes to one engine as one list, so that its prompt is prefilled once. The engine with the fewest outstanding
tokens gets it. Who belongs to the pool comes from outside (`set_members`, the run's own record); whether a member
answers, the pool finds out for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal

from moe_asyncrl.data.errors import EngineLost
from moe_asyncrl.data.messages import Member
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.engine.errors import (
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    EngineUnwell,
    MalformedReply,
    NoEngines,
)

Health = Literal["healthy", "out"]


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """One member as the pool sees it now."""

    member: Member
    health: Health
    reason: str
    """Why it is out."""
    outstanding_tokens: int
    """Upper bound of the tokens it still has to process: prompts, and new tokens at their limit."""
    outstanding_requests: int


class _Engine:
    def __init__(self, member: Member, client: EngineClient) -> None:
        self.member = member
        self.client = client
        self.reason = ""
        self.tokens = 0
        self.requests = 0
        self.lost = asyncio.Event()

    @property
    def serving(self) -> bool:
        return not self.reason and self.member.state == "serving"


class EnginePool:
    """Use inside one event loop, with `async with` (which also runs the health probes)."""

    def __init__(
        self,
        make_client: Callable[[Member], EngineClient],
        *,
        probe_period_s: float = 5.0,
        probe_deadline_s: float = 20.0,
    ) -> None:
        """`probe_deadline_s`: an engine whose scheduler is silent for so long is taken out."""
        self._make_client = make_client
        self._probe_period_s = probe_period_s
        self._probe_deadline_s = probe_deadline_s
        self._engines: dict[str, _Engine] = {}
        self._changed = asyncio.Event()
        self._prober: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EnginePool:
        self._prober = asyncio.create_task(self._probe_for_ever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._prober is not None:
            self._prober.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._prober
        for engine in self._engines.values():
            engine.lost.set()
            await engine.client.close()
        self._engines.clear()
        await asyncio.gather(*self._closing)

    # --- membership ---------------------------------------------------------------------------------------------

    def set_members(self, members: Sequence[Member]) -> None:
        """The run's members now. One that is gone, or started anew (`incarnation`), loses its requests."""
        wanted = {m.name: m for m in members}
        for name, engine in list(self._engines.items()):
            now = wanted.get(name)
            if now is not None and (now.incarnation, now.url) == (engine.member.incarnation, engine.member.url):
                engine.member = now
                continue
            self._take_out(engine, "left the run" if now is None else "was started anew")
            del self._engines[name]
            closing = asyncio.ensure_future(engine.client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for name, member in wanted.items():
            if name not in self._engines:
                self._engines[name] = _Engine(member, self._make_client(member))
        self._notify()

    def take_out(self, name: str, reason: str) -> None:
        """Give the engine nothing more; its running requests fail with EngineLost.

        The next successful probe brings it back.
        """
        self._take_out(self._engines[name], reason)

    def status(self) -> tuple[EngineStatus, ...]:
        """Every member, in the order of their names."""
        return tuple(
            EngineStatus(e.member, "out" if e.reason else "healthy", e.reason, e.tokens, e.requests)
            for _, e in sorted(self._engines.items())
        )

    def version(self, name: str) -> int:
        """The committed version that the run says the engine serves."""
        return self._engines[name].member.version

    def _take_out(self, engine: _Engine, reason: str) -> None:
        engine.reason = reason
        engine.lost.set()
        engine.lost = asyncio.Event()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self, group: Sequence[GenerateRequest], *, deadline_s: float, wait_s: float = 0.0, mask: bool = False
    ) -> list[Completion]:
        """One group on one engine. Each request's `version` is replaced by the engine's committed version.

        `wait_s`: how long to wait for an engine if none serves now. Raises EngineLost (the engine failed: resubmit),
        NoEngines, EngineRefused and MalformedReply (the request itself is at fault: do not).
        """
        engine = await self._choose(wait_s)
        asked = [dataclasses.replace(r, version=engine.member.version) for r in group]
        tokens = sum(len(r.input_ids) + r.sampling.max_new_tokens for r in asked)
        engine.tokens += tokens
        engine.requests += len(asked)
        try:
            return await self._on(engine, asked, deadline_s, mask)
        finally:
            engine.tokens -= tokens
            engine.requests -= len(asked)

    async def generate_anywhere(
        self,
        group: Sequence[GenerateRequest],
        *,
        deadline_s: float,
        attempts: int = 3,
        wait_s: float = 0.0,
        mask: bool = False,
    ) -> list[Completion]:
        """`generate`, resubmitted to another engine when one is lost, at most `attempts` times in all.

        Raises the last EngineLost, or NoEngines as soon as none is left.
        """
        for attempt in range(attempts):
            # An engine that comes back may still know the first attempt under its name.
            named = [dataclasses.replace(r, rid=f"{r.rid}~{attempt}") for r in group] if attempt else group
            try:
                done = await self.generate(named, deadline_s=deadline_s, wait_s=wait_s, mask=mask)
            except EngineLost:
                if attempt + 1 == attempts:
                    raise
                continue
            return [dataclasses.replace(c, rid=r.rid) for c, r in zip(done, group, strict=True)]
        raise ValueError(f"attempts must be positive, got {attempts}")

    async def _choose(self, wait_s: float) -> _Engine:
        end = time.monotonic() + wait_s
        while True:
            serving = [e for e in self._engines.values() if e.serving]
            if serving:
                return min(serving, key=lambda e: (e.tokens, e.member.name))
            left = end - time.monotonic()
            if left <= 0:
                known = "; ".join(f"{name} {e.reason or e.member.state}" for name, e in sorted(self._engines.items()))
                waited = f" (waited {wait_s:g} s)" if wait_s else ""
                raise NoEngines(f"no engine is left to sample with{waited}: {known or 'the run has none'}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def _on(
        self, engine: _Engine, asked: Sequence[GenerateRequest], deadline_s: float, mask: bool
    ) -> list[Completion]:
        lost = asyncio.ensure_future(engine.lost.wait())
        call = asyncio.ensure_future(engine.client.generate(asked, deadline_s=deadline_s, mask=mask))
        try:
            await asyncio.wait({lost, call}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineLost(f"{engine.member.name} was taken out of the pool: {engine.reason}")
            return call.result()
        except (EngineUnreachable, EngineUnwell) as e:
            self._take_out(engine, str(e))
            raise
        except EngineTimeout:
            # Slow or dead? Only in the second case do its other requests fail with this one.
            await self._probe(engine)
            raise
        finally:
            for task in (lost, call):
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task

    # --- health -------------------------------------------------------------------------------------------------

    async def _probe_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._probe_period_s)
            await asyncio.gather(*(self._probe(e) for e in list(self._engines.values())))

    async def _probe(self, engine: _Engine) -> None:
        """Ask the scheduler for a sign of life, and an engine that is out whether it serves the committed version."""
        try:
            await engine.client.check_scheduler(deadline_s=self._probe_deadline_s)
            if not engine.reason:
                return
            version = await engine.client.serving_version(deadline_s=self._probe_deadline_s)
        except (EngineLost, EngineRefused, MalformedReply) as e:
            if not engine.reason:
                self._take_out(engine, str(e))
            return
        if version == engine.member.version:
            engine.reason = ""
            self._notify()
