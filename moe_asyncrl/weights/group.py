"""Process groups of updates: one trainer rank, which is rank 0, and every rank of some engines.

They stand beside the trainer's own groups and use none of torch.distributed's global state, so that they can be made,
dropped and made again while the trainer lives. The first trainer rank forms them one after the other, so no two
engines ever wait for each other's join:

    first rank:  open (a store, the engines' joins, their arrival) ─▶ order to the sender ─▶ finish (the joins' outcome)
    sender:      connect

All waits are bounded; while the engines arrive, one that refuses is heard at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.weights.backend import Transport
from moe_asyncrl.weights.failure import EnginesFailed, raise_if_any
from moe_asyncrl.weights.transport import SendFailed

_c10d: Any = dist
POLL_S = 0.005
GRACE_S = 5.0
"""How long engines may take to come out of a rendezvous or a collective that was called off."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the ranks of a group meet."""

    name: str
    """See `group_name`."""
    host: str
    port: int
    world_size: int
    backend: Transport
    timeout_s: float


def group_name(stem: str, timeout_s: float) -> str:
    """A name that says how long members wait for each other: SGLang's request to join a group has no field for it, and
    its own limit is half an hour. `stem` was never used before."""
    return f"{stem}@{timeout_s:.3f}s"


def wait_of(name: object) -> float | None:
    """Seconds that members of a group wait for each other; None if it is none of ours."""
    found = re.fullmatch(r".+@(\d+\.\d{3})s", str(name))
    return None if found is None else float(found[1])


class Meeting:
    """One group as it is formed, on the first rank. Made by `open`; then `finish`, or `call_off`."""

    def __init__(self, store: _Store, engines: tuple[EngineControl, ...], joins: dict[str, asyncio.Task[None]]) -> None:
        self._store, self._engines, self._joins = store, engines, joins
        self.rendezvous = store.rendezvous

    @classmethod
    async def open(
        cls, engines: Sequence[EngineControl], *, name: str, host: str, backend: Transport, timeout_s: float
    ) -> Meeting:
        """Have all engines come to a store here; returns when they are there.

        Raises:
            EnginesFailed: an engine refused, died or did not come within `timeout_s` seconds; the others are free.
        """
        first_ranks, world_size = _first_ranks(engines)
        store = _Store(name, host, world_size, backend, timeout_s)
        joins = {
            engine.name: asyncio.create_task(
                engine.join_group(
                    address=host,
                    port=store.rendezvous.port,
                    rank_offset=first_ranks[engine.name],
                    world_size=world_size,
                    group=name,
                    backend=backend,
                    deadline_s=timeout_s + GRACE_S,
                )
            )
            for engine in engines
        }
        meeting = cls(store, tuple(engines), joins)
        try:
            await meeting._arrivals(first_ranks, timeout_s)
        except EnginesFailed as failure:
            raise await meeting.call_off(failure) from None
        return meeting

    async def finish(self) -> None:
        """After the sender has connected. Raises EnginesFailed, with the others free."""
        timeout_s = self.rendezvous.timeout_s
        failed = await _outcomes(self._joins, timeout_s)
        if failed:
            raise await self.call_off(EnginesFailed(failed))
        self._store.close()

    async def call_off(self, failure: EnginesFailed) -> EnginesFailed:
        """Free the engines. Returns the failure to raise: engines at fault are those that `failure` names, or the ones
        that do not come out."""
        # Without the store, engines that wait in the rendezvous come out of it with an error. Those that wait for one
        # that has died since do so at their own limit.
        self._store.close()
        lost = {**_errors(self._joins), **failure.lost} if not failure.lost else dict(failure.lost)
        others = {name: task for name, task in self._joins.items() if name not in lost}
        limit = self.rendezvous.timeout_s + GRACE_S
        stuck = await _outcomes(others, limit, only_unfinished=True) if others else {}
        await leave([e for e in self._engines if e.name not in stuck], self.rendezvous.name)
        for task in self._joins.values():
            task.cancel()
        return EnginesFailed({**stuck, **lost}, str(failure))

    async def _arrivals(self, first_ranks: dict[str, int], timeout_s: float) -> None:
        """Wait until every engine is in the rendezvous. Raises EnginesFailed on a refusal, or at the deadline."""
        end = time.monotonic() + timeout_s
        while True:
            raise_if_any(_errors(self._joins))
            if all(task.done() for task in self._joins.values()):
                return
            there = self._store.arrived()
            late = [
                e
                for e in self._engines
                if not set(range(first_ranks[e.name], first_ranks[e.name] + e.world_size)) <= there
            ]
            if not late:
                return
            if time.monotonic() > end:
                raise EnginesFailed({e.name: f"did not join the update group within {timeout_s:g} s" for e in late})
            await asyncio.sleep(POLL_S)


def connect(at: Rendezvous) -> Any:
    """The sender's end, rank 0 of the group. Blocks until all ranks are connected (gloo), or not at all (NCCL).

    Raises SendFailed.
    """
    limit = timedelta(seconds=at.timeout_s)
    reason = ""
    try:
        store = _c10d.TCPStore(at.host, at.port, None, False, limit)
        # SGLang's init_custom_process_group and torch's helper each put the name in front of the keys.
        store = _c10d.PrefixStore(f"{at.name}/", _c10d.PrefixStore(at.name, store))
        if at.backend == "nccl":
            options = _c10d.ProcessGroupNCCL.Options()
            # Above our own limit: the watchdog's way of ending a collective is to end the process.
            options._timeout = 2 * limit
            return _c10d.ProcessGroupNCCL(_c10d.PrefixStore("cuda/", store), 0, at.world_size, options)
        gloo = _c10d.ProcessGroupGloo._Options()
        gloo._timeout = limit
        gloo._devices = [_c10d.ProcessGroupGloo.create_device(hostname=own_address(at.host, at.port))]
        return _c10d.ProcessGroupGloo(_c10d.PrefixStore("cpu/", store), 0, at.world_size, gloo)
    except (RuntimeError, dist.DistError) as error:
        reason = " ".join(str(error).split())[:300]
    raise SendFailed(f"the group {at.name} was not formed within {at.timeout_s:g} s ({reason})")


def drop(process_group: Any) -> None:
    """Leave a group, together with the caller's last reference to it.

    Engines that wait in one of its collectives come out of it with an error: gloo closes its connections when nothing
    refers to the group any more.
    """
    if "nccl" in process_group.name().lower():
        with contextlib.suppress(RuntimeError):
            process_group.abort()


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`: gloo listens there."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


async def leave(engines: Sequence[EngineControl], name: str) -> None:
    """Have engines drop a group; one that never joined, or is dead, is out of it anyway."""

    async def one(engine: EngineControl) -> None:
        with contextlib.suppress(Exception):
            await engine.leave_group(group=name, deadline_s=GRACE_S)

    await asyncio.gather(*(one(engine) for engine in engines))


class _Store:
    """The store at which the ranks meet. Closing it ends the rendezvous of whoever still waits there."""

    def __init__(self, name: str, host: str, world_size: int, backend: Transport, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        self._store: Any = _c10d.TCPStore(host, 0, world_size, True, limit, wait_for_workers=False)
        self.rendezvous = Rendezvous(
            name=name,
            host=host,
            port=int(self._store.port),
            world_size=world_size,
            backend=backend,
            timeout_s=timeout_s,
        )

    def arrived(self) -> set[int]:
        """Ranks that have published their address (gloo only)."""
        name = self.rendezvous.name
        prefix = f"{name}/{name}//cpu//0/"
        keys = [str(key).removeprefix(prefix) for key in self._store.list_keys() if str(key).startswith(prefix)]
        return {int(key) for key in keys if key.isdigit()}

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
