"""A buffer that serves on a thread of the test, and a run that has begun."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from moe_asyncrl.buffer.endpoint import Endpoint
from moe_asyncrl.buffer.ledger import Limits
from moe_asyncrl.buffer.security import KeyPair, new_pair
from moe_asyncrl.buffer.server import BufferServer
from moe_asyncrl.buffer.service import BufferService, Timing
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.wire import Frame, encode
from tests.data.samples import group

LIMITS = Limits(groups_per_step=2, max_staleness=2, max_attempts=1, capacity=6)
SERVER_KEYS, CLIENT_KEYS = new_pair(), new_pair()


def service(limits: Limits = LIMITS, **kwargs: Any) -> BufferService:
    return BufferService(limits, **kwargs)


class Ask:
    """Calls a service as one sender does, without a socket."""

    def __init__(self, to: BufferService, sender: str = "trainer-0", epoch: int = 0) -> None:
        self.to = to
        self.sender = sender
        self.epoch = epoch
        self.now = 0.0
        self.number = 0
        self.frames: Sequence[Frame] = ()

    def __call__(self, kind: type[m.Request], frames: Sequence[Frame] = (), **fields: Any) -> Any:
        self.number += 1
        head = {"epoch": self.epoch, "sender": self.sender, "request": self.number}
        request: Any = kind(**{**head, **fields})
        reply, self.frames = self.to.handle(request, frames, self.now)
        assert reply.request == request.request
        return reply

    def put(self, ticket: m.Ticket, trajectories: Sequence[Trajectory] | None = None, **kwargs: Any) -> Any:
        headers, frames = packed(trajectories or group(ticket.index, ticket.attempt, **kwargs))
        return self(m.PutGroup, frames, ticket=ticket, headers=headers, failed=0, epoch=ticket.epoch)


def packed(trajectories: Sequence[Trajectory]) -> tuple[tuple[Any, ...], list[Frame]]:
    parts = [encode(t) for t in trajectories]
    return tuple(h for h, _ in parts), [f for _, own in parts for f in own]


def begun(to: BufferService, *, holder: str = "t", step: int = 0) -> Ask:
    """The owner of a run whose first weights are committed."""
    ask = Ask(to)
    ask.epoch = ask(m.AcquireLease, holder=holder).lease
    assert isinstance(ask(m.Begin, step=step, cursor=m.Cursor(watermark=2 * step), counters=m.Counters()), m.Done)
    assert isinstance(ask(m.Commit, version=step, members=(), lost=()), m.Done)
    return ask


def member(number: int = 0, incarnation: int = 1) -> m.Member:
    return m.Member(
        name=f"engine-{number}",
        url=f"http://h:{number}",
        incarnation=incarnation,
        world_size=1,
        state="joining",
        version=-1,
        heartbeat=0.0,
    )


class Running:
    """A buffer that listens; `stop` and `start` again, at a new address."""

    def __init__(self, to: BufferService, keys: KeyPair | None = SERVER_KEYS, **kwargs: Any) -> None:
        self.service = to
        self.endpoint: Endpoint | None = None
        self._keys = keys
        self._kwargs = kwargs

    def find(self) -> Endpoint | None:
        return self.endpoint

    def start(self) -> None:
        ready = threading.Event()
        self._failed: BaseException | None = None

        async def main() -> None:
            server = BufferServer(
                self.service,
                address="tcp://127.0.0.1:*",
                keys=self._keys,
                clients=frozenset({CLIENT_KEYS.public}),
                **self._kwargs,
            )
            self.endpoint = server.bind()
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.create_task(server.serve())
            ready.set()
            try:
                await self._serving
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                self._failed = error
            finally:
                server.close()

        self._thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> None:
        if self.endpoint is None:
            return
        self.endpoint = None
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._failed is not None:
            raise self._failed


@contextlib.contextmanager
def running(to: BufferService | None = None, **kwargs: Any) -> Iterator[Running]:
    server = Running(to or service(timing=Timing(retry_s=0.01)), **kwargs)
    server.start()
    try:
        yield server
    finally:
        server.stop()
