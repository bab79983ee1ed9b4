"""The process group of updates: the trainer's first rank and every rank of every engine.

It stands beside the trainer's own groups and uses none of torch.distributed's global state, so that it can be made,
dropped and made again while the trainer lives. All waits are polled: an engine that refuses is heard at once, also
while others are already inside a blocking call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.weights.backend import Transport
from moe_asyncrl.weights.failure import EnginesFailed, raise_if_any

_c10d: Any = dist
"""For the names that torch leaves out of the module's typing."""
POLL_S = 0.005
GRACE_S = 5.0
"""How long engines may take to come out of a rendezvous or a collective that was called off."""


class BroadcastFailed(Exception):
    """The backend's own words."""


class UpdateGroup:
    """A formed group. Made by `form`; `dissolve` it, or `abandon` it when something in it failed."""

    def __init__(self, name: str, transport: Transport, engines: tuple[EngineControl, ...], process_group: Any) -> None:
        self.name = name
        self.transport = transport
        self.engines = engines
        self._process_group = process_group

    @classmethod
    async def form(
        cls, engines: Sequence[EngineControl], *, name: str, host: str, transport: Transport, timeout_s: float
    ) -> UpdateGroup:
        """Meet all ranks of `engines` at a store on `host`. `name` must never have been used before.

        Raises:
            EnginesFailed: an engine refused, died or did not come within `timeout_s` seconds; the others are free.
        """
        first_ranks, world_size = _first_ranks(engines)
        meeting = _Meeting(host, world_size, name, transport, timeout_s)
        joins = {
            engine.name: asyncio.create_task(
                engine.join_group(
                    address=host,
                    port=meeting.port,
                    rank_offset=first_ranks[engine.name],
                    world_size=world_size,
                    group=name,
                    backend=transport,
                    deadline_s=timeout_s + GRACE_S,
                )
            )
            for engine in engines
        }
        try:
            await _arrivals(meeting, engines, first_ranks, joins, timeout_s)
            process_group = await _connect(meeting, joins, timeout_s)
            raise_if_any(await _outcomes(joins, timeout_s))
        except EnginesFailed as failure:
            # Without the store, engines that wait in the rendezvous come out of it with an error.
            meeting.close()
            others = {name: task for name, task in joins.items() if name not in failure.lost}
            stuck = await _outcomes(others, GRACE_S, only_unfinished=True) if others else {}
            await _leave([e for e in engines if e.name not in stuck], name, GRACE_S)
            raise EnginesFailed({**stuck, **failure.lost}) from failure
        finally:
            meeting.close()
            for task in joins.values():
                task.cancel()
        return cls(name, transport, tuple(engines), process_group)

    async def broadcast(self, flat: torch.Tensor) -> None:
        """Send a contiguous uint8 tensor from here to all engines; returns when this side is done with the memory.

        Raises BroadcastFailed if a peer is gone or the time limit passed.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        work, reason = None, ""
        try:
            if self.transport == "nccl":
                # The first NCCL collective blocks its thread until every rank is there.
                work = await asyncio.to_thread(self._process_group.broadcast, [flat], options)
            else:
                work = self._process_group.broadcast([flat], options)
            pause = 0.0002
            while not work.is_completed():
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, POLL_S)
            work.wait()
        except (RuntimeError, dist.DistError) as error:
            reason = " ".join(str(error).split())[:300]
        finally:
            # A traceback that somebody keeps would keep the connections open, which others take for life.
            work = None
        if reason:
            raise BroadcastFailed(reason)

    async def leave(self, engines: Sequence[EngineControl]) -> None:
        """Have those of `engines` that are in the group drop it. One that fails to is not asked twice."""
        await _leave([e for e in engines if e in self.engines], self.name, GRACE_S)

    async def dissolve(self, engines: Sequence[EngineControl]) -> None:
        """Drop the group on `engines` and here."""
        await self.leave(engines)
        self.abandon()

    def abandon(self) -> None:
        """Drop this side. Engines that wait in a collective of the group come out of it with an error."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None and self.transport == "nccl":
            process_group.abort()


class _Meeting:
    """The store at which the ranks meet. Closing it ends the rendezvous of whoever still waits there."""

    def __init__(self, host: str, world_size: int, name: str, transport: Transport, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = _c10d.TCPStore(host, 0, world_size, True, self._timeout, wait_for_workers=False)
        self._host, self._world_size, self._name, self._transport = host, world_size, name, transport
        self.port = int(self._store.port)

    def arrived(self) -> set[int]:
        """Ranks that have published their address (gloo only)."""
        prefix = f"{self._name}/{self._name}//cpu//0/"
        keys = [str(key).removeprefix(prefix) for key in self._store.list_keys() if str(key).startswith(prefix)]
        return {int(key) for key in keys if key.isdigit()}

    def connect(self) -> Any:
        """This side's process group, rank 0. Blocks until all ranks are connected (gloo) or at once (NCCL)."""
        # SGLang's init_custom_process_group and torch's helper each put the name in front of the keys.
        store = _c10d.PrefixStore(f"{self._name}/", _c10d.PrefixStore(self._name, self._store))
        if self._transport == "nccl":
            options = _c10d.ProcessGroupNCCL.Options()
            # Above our own limit: the watchdog's way of ending a collective is to end the process.
            options._timeout = 2 * self._timeout
            return _c10d.ProcessGroupNCCL(_c10d.PrefixStore("cuda/", store), 0, self._world_size, options)
        gloo = _c10d.ProcessGroupGloo._Options()
        gloo._timeout = self._timeout
        gloo._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._host)]
        return _c10d.ProcessGroupGloo(_c10d.PrefixStore("cpu/", store), 0, self._world_size, gloo)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._store = None


def _first_ranks(engines: Sequence[EngineControl]) -> tuple[dict[str, int], int]:
    """The first rank of each engine, and the size of the group."""
    first, size = {}, 1
    for engine in engines:
        first[engine.name] = size
        size += engine.world_size
    return first, size


async def _arrivals(
    meeting: _Meeting,
    engines: Sequence[EngineControl],
    first_ranks: dict[str, int],
    joins: dict[str, asyncio.Task[None]],
    timeout_s: float,
) -> None:
    """Wait until every engine is in the rendezvous. Raises EnginesFailed on the first refusal, or at the deadline."""
    end = time.monotonic() + timeout_s
    while True:
        raise_if_any(_errors(joins))
        if all(task.done() for task in joins.values()):
            return
        there = meeting.arrived()
        late = [e for e in engines if not set(range(first_ranks[e.name], first_ranks[e.name] + e.world_size)) <= there]
        if not late:
            return
        if time.monotonic() > end:
            raise EnginesFailed({e.name: f"did not join the update group within {timeout_s:g} s" for e in late})
        await asyncio.sleep(POLL_S)


async def _connect(meeting: _Meeting, joins: dict[str, asyncio.Task[None]], timeout_s: float) -> Any:
    """Connect to all ranks, unless one of them fails meanwhile."""
    connecting = asyncio.create_task(asyncio.to_thread(meeting.connect))
    while not connecting.done():
        failed = _errors(joins)
        if failed:
            # The thread ends by its own time limit; what it makes then is dropped.
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise EnginesFailed(failed)
        await asyncio.sleep(POLL_S)
    try:
        return connecting.result()
    except RuntimeError as error:
        await asyncio.sleep(0.2)
        failed = _errors(joins) or {
            name: f"did not connect within {timeout_s:g} s ({error})" for name, task in joins.items() if not task.done()
        }
        raise EnginesFailed(failed) from error


def _errors(tasks: dict[str, asyncio.Task[None]]) -> dict[str, str]:
    return {
        name: str(task.exception())
        for name, task in tasks.items()
        if task.done() and not task.cancelled() and task.exception() is not None
    }


async def _outcomes(
    tasks: dict[str, asyncio.Task[None]], wait_s: float, *, only_unfinished: bool = False
) -> dict[str, str]:
    """Errors by engine after at most `wait_s`; an engine that has not answered by then is among them."""
    await asyncio.wait(tasks.values(), timeout=wait_s)
    unfinished = {name: f"did not answer within {wait_s:g} s" for name, task in tasks.items() if not task.done()}
    return unfinished if only_unfinished else {**_errors(tasks), **unfinished}


async def _leave(engines: Sequence[EngineControl], name: str, deadline_s: float) -> None:
    async def leave(engine: EngineControl) -> None:
        # An engine that never joined refuses, and a dead one cannot: both are out of the group.
        with contextlib.suppress(Exception):
            await engine.leave_group(group=name, deadline_s=deadline_s)

    await asyncio.gather(*(leave(engine) for engine in engines))
