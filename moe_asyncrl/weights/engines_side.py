"""The engines' side of one attempt at an update, seen from the trainer's first rank: what is asked of all of them.

    survey ─▶ prepare ─▶ pause ─▶ receive … ─▶ finish ─▶ commit ─▶ resume        recover: after any failure

Every call has a deadline, and its error names the engine and what it was waited for. For one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from moe_asyncrl.data.errors import EngineLost, StaleEpoch, UserError
from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.data.weights import Hold, Memory, Prepare
from moe_asyncrl.weights.failure import EnginesFailed, raise_if_any
from moe_asyncrl.weights.group import GRACE_S

AT_ONCE = 8
"""Messages in one call: between two calls an engine answers health probes."""
IDLE_POLL_S = 0.05
ALIKE_S = 0.5
"""Between the first error of a transfer and those of other engines that got the same message."""

Call = Callable[[EngineControl], Awaitable[object]]


class EnginesSide:
    """The engines of one attempt."""

    def __init__(self, engines: Sequence[EngineControl], *, update: str, timeout_s: float) -> None:
        """`update`: its name, never used before. `timeout_s`: the longest single step, in seconds."""
        self.engines = tuple(engines)
        self.update = update
        self._timeout_s = timeout_s
        self._replies: dict[str, asyncio.Task[None]] = {}
        self.prepared = False
        """Engines know of the update."""
        self.committing = False
        """Some may have committed it."""
        self.gone: set[str] = set()
        """After `recover`: engines that are dead, hang or do not let go of the update."""

    async def survey(self, epoch: int) -> dict[str, Hold]:
        """What each engine holds, by name. Ends what a trainer before this one has left there. Raises EnginesFailed."""
        found: dict[str, Hold] = {}

        async def one(engine: EngineControl) -> None:
            held = await engine.hold(deadline_s=self._timeout_s)
            if held.update and held.epoch <= epoch:
                reason = "its trainer is gone, another one begins"
                held = await engine.abandon(held.update, reason=reason, deadline_s=self._timeout_s)
            found[engine.name] = held

        await self._each(one)
        return found

    async def prepare(self, orders: Mapping[str, Prepare]) -> None:
        """Announce the update. Raises EnginesFailed, StaleEpoch."""
        self.prepared = True
        await self._each(lambda e: e.prepare(orders[e.name], deadline_s=self._timeout_s))

    async def pause(self, mode: str) -> None:
        """Stop generating. Raises EnginesFailed."""
        await self._each(lambda e: e.pause(mode=mode, deadline_s=self._timeout_s))

    async def sleep(self, epoch: int) -> dict[str, str]:
        """Stop generating and give all device memory back, once no request holds any. Returns engines that are gone.

        Raises UserError: an engine is not idle in time, or cannot sleep.
        """
        end = time.monotonic() + self._timeout_s

        async def one(engine: EngineControl) -> None:
            await engine.pause(mode="retract", deadline_s=self._timeout_s)
            while True:
                try:
                    await engine.sleep(epoch=epoch, deadline_s=self._timeout_s)
                    return
                except (EngineLost, StaleEpoch):
                    raise
                except UserError as refusal:
                    if time.monotonic() > end:
                        raise UserError(f"{refusal} (waited {self._timeout_s:g} s for it to be idle)") from refusal
                await asyncio.sleep(IDLE_POLL_S)

        results = await asyncio.gather(*(one(e) for e in self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineLost):
                raise result
        pairs = zip(self.engines, results, strict=True)
        return {e.name: str(r) for e, r in pairs if isinstance(r, BaseException)}

    async def wake(self, engines: Sequence[EngineControl], memory: Memory, epoch: int) -> dict[str, str]:
        """Give engines that sleep a part of their memory. Returns the reasons of those that failed."""
        return await self._outcome(engines, lambda e: e.wake(memory, epoch=epoch, deadline_s=self._timeout_s))

    async def receive(
        self, on_failure: Callable[[], None], leave: Callable[[Sequence[EngineControl]], Awaitable[None]]
    ) -> None:
        """Have all engines receive everything. Calls `on_failure` at the first error, and raises EnginesFailed.

        Before that, the engines that failed `leave`: those that pass messages on to them hang until they do.
        """

        async def one(engine: EngineControl) -> None:
            left = 1
            while left:
                # Longer than the wait for one message, so that an engine that hangs is told from those it holds up.
                limit = 2 * self._timeout_s + 2 * GRACE_S
                left = (await engine.receive(self.update, AT_ONCE, deadline_s=limit)).left

        self._replies = {e.name: asyncio.create_task(one(e)) for e in self.engines}
        await asyncio.wait(self._replies.values(), return_when=asyncio.FIRST_EXCEPTION)
        if self._reply_errors():
            on_failure()
            # Where it is the message that is wrong, the others say the same, and none of them is at fault.
            await asyncio.wait(self._replies.values(), timeout=ALIKE_S)
            failed = {name: str(error) or repr(error) for name, error in self._reply_errors().items()}
            await leave([e for e in self.engines if e.name in failed])
            raise EnginesFailed(failed)

    async def finish(self, manifests: Mapping[str, str]) -> None:
        """Each engine has everything, and holds what was sent to it. Raises EnginesFailed."""

        async def one(engine: EngineControl) -> None:
            got = await engine.finish(self.update, deadline_s=self._timeout_s)
            if got != manifests[engine.name]:
                raise ValueError(f"{engine.name} received other messages than were sent: manifest {got}")

        await self._each(one)

    async def commit(self, version: int, manifests: Mapping[str, str]) -> dict[str, str]:
        """Have all engines take the weights as `version`. Returns the reasons of those that failed."""
        self.committing = True
        return await self._outcome(
            self.engines,
            lambda e: e.commit(self.update, version=version, manifest=manifests[e.name], deadline_s=self._timeout_s),
        )

    async def resume(self, engines: Sequence[EngineControl]) -> dict[str, str]:
        """Let engines go on. Returns the reasons of those that did not answer."""
        return await self._outcome(engines, lambda e: e.resume(deadline_s=self._timeout_s))

    async def recover(self, cause: EnginesFailed, *, resume: bool = False) -> dict[str, str]:
        """End the attempt on engines that are not at fault. Returns those at fault, with reasons.

        The senders have left the transfer. Engines that are dead are at fault before engines that complain: when one
        dies inside a collective, its neighbours complain as well. What is returned may be empty if nobody is to blame;
        then the same engines may try again. `resume`: there will be no other attempt; engines that still hold whole
        weights go on.
        """
        stuck = await self._drain()
        dead = {**stuck, **{n: str(e) for n, e in self._reply_errors().items() if isinstance(e, EngineLost)}}
        alive = [e for e in self.engines if e.name not in dead]
        dead |= await self._outcome(alive, lambda e: e.hold(deadline_s=GRACE_S))
        lost = dead or dict(cause.lost)
        reason = str(cause)[:300]

        async def release(engine: EngineControl) -> None:
            held = await engine.abandon(self.update, reason=reason, deadline_s=self._timeout_s)
            if resume and held.state == "serving":
                await engine.resume(deadline_s=self._timeout_s)

        unwilling = {}
        if self.prepared:
            unwilling = await self._outcome([e for e in self.engines if e.name not in lost], release)
        self.gone = {*dead, *unwilling}
        return lost | unwilling

    async def _drain(self) -> dict[str, str]:
        """Wait a little for calls under way; the engines that do not come out of them."""
        pending = {name: task for name, task in self._replies.items() if not task.done()}
        if pending:
            await asyncio.wait(pending.values(), timeout=GRACE_S)
        stuck = {}
        for name, task in pending.items():
            if not task.done():
                stuck[name] = f"{name} did not come out of the update within {GRACE_S:g} s"
                task.cancel()
        return stuck

    def _reply_errors(self) -> dict[str, BaseException]:
        errors = {}
        for name, task in self._replies.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                errors[name] = error
        return errors

    async def _each(self, call: Call) -> None:
        raise_if_any(await self._outcome(self.engines, call))

    async def _outcome(self, engines: Sequence[EngineControl], call: Call) -> dict[str, str]:
        results = await asyncio.gather(*(call(e) for e in engines), return_exceptions=True)
        for result in results:
            if isinstance(result, StaleEpoch):
                raise result
        pairs = zip(engines, results, strict=True)
        return {e.name: str(r) or repr(r) for e, r in pairs if isinstance(r, BaseException)}
