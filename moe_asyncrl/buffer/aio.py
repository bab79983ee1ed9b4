"""The rollout's and the engines' side of the buffer: an asynchronous client; many requests may wait at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import zmq
import zmq.asyncio

from moe_asyncrl.buffer.codec import NOT_A_MESSAGE, decode_reply, encode, expect
from moe_asyncrl.buffer.endpoint import LOOK_S, Endpoint, Find, connect, finder
from moe_asyncrl.buffer.patience import Patience
from moe_asyncrl.buffer.requests import Requests
from moe_asyncrl.buffer.security import KeyPair, client_keys
from moe_asyncrl.data.errors import DeadlineExceeded
from moe_asyncrl.data.group_wire import encode_group
from moe_asyncrl.data.messages import (
    AnyReply,
    AnyRequest,
    Done,
    Member,
    MemberId,
    PutResult,
    RunState,
    Ticket,
    Tickets,
)
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.wire import Blocks, Frame
from moe_asyncrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)


class AsyncBufferClient:
    """Calls raise `DeadlineExceeded`, `StaleEpoch` (the credit's lease is over: forget the group) or `RequestRefused`.

    A request without an answer is sent again, over a new connection, until its deadline; the buffer answers a request
    that comes twice as it did the first time.
    """

    def __init__(
        self, find: Find, keys: KeyPair | None, *, sender: str, deadline_s: float = 60.0, resend_s: float = 5.0
    ) -> None:
        """`deadline_s`: longest wait for any answer. `resend_s`: silence after which a request is sent again."""
        self._find = find
        self._keys = keys
        self._requests = Requests(sender)
        self._deadline_s = deadline_s
        self._resend_s = resend_s
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._address = "nowhere"
        self._endpoint: Endpoint | None = None
        self._connection = 0
        self._waiting: dict[int, asyncio.Future[AnyReply]] = {}
        self._holding: dict[Ticket, None] = {}
        self._asking = asyncio.Lock()

    @classmethod
    async def connect(
        cls, folder: RunFolder, *, sender: str, deadline_s: float = 60.0, start_s: float = 60.0
    ) -> AsyncBufferClient:
        """The buffer of a run, once it listens (at most `start_s` seconds from now)."""
        find = finder(folder)
        end = time.monotonic() + start_s
        while (endpoint := find()) is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"{sender}: the buffer did not say where it listens within {start_s:g} s")
            await asyncio.sleep(0.05)
        keys = client_keys(folder.keys) if endpoint.public_key is not None else None
        return cls(find, keys, sender=sender, deadline_s=deadline_s)

    # --- the run -------------------------------------------------------------------------------------------------

    async def state(self) -> RunState:
        """The state of the run now. Any request is a sign of life; a sampler should ask something every few seconds."""
        return expect(await self._ask(self._requests.state()), RunState)

    async def fail(self, error: str) -> None:
        """End the run with an error, whoever owns it now."""
        epoch = (await self.state()).epoch
        expect(await self._ask(self._requests.set_phase("failed", error, epoch)), Done)

    # --- engine --------------------------------------------------------------------------------------------------

    async def join(self, member: Member) -> RunState:
        """An engine is up, or still up. The state tells it what it is now (`quarantined`: start a new life)."""
        return expect(await self._ask(self._requests.join(member)), RunState)

    async def leave(self, life: MemberId, reason: str) -> None:
        """An engine is gone."""
        expect(await self._ask(self._requests.leave(life, reason)), Done)

    # --- rollout -------------------------------------------------------------------------------------------------

    async def ask_tickets(self, wanted: int) -> Tickets:
        """Up to `wanted` credits, maybe none: then ask again after `retry_after` seconds.

        Each is used up by `put_group` or given back by `return_ticket`, also when sampling is cancelled.
        """
        async with self._asking:
            reply = expect(await self._ask(self._requests.ask_tickets(wanted, self._holding)), Tickets)
            for ticket in [t for t in self._holding if t.epoch != reply.state.epoch]:
                del self._holding[ticket]
            self._holding.update(dict.fromkeys(reply.tickets))
            return reply

    async def put_group(
        self, ticket: Ticket, trajectories: Sequence[Trajectory], failed: int = 0, *, blocks: Blocks = ()
    ) -> PutResult:
        """Hand over a finished group; `failed` more samples of it could not be used.

        `blocks`: how the trainer's pipeline stages cut the MoE layers; all in one if not given.

        The caller forgets it either way; the reason says why it was not held.
        """
        headers, frames = encode_group(trajectories, blocks=blocks)
        try:
            return expect(await self._ask(self._requests.put_group(ticket, headers, failed), frames), PutResult)
        finally:
            self._holding.pop(ticket, None)

    async def return_ticket(
        self, ticket: Ticket, fate: Literal["failed", "filtered", "unused"], reason: str, trajectories: int = 0
    ) -> None:
        """Give a credit back. `trajectories`: how many were sampled for it, for the account."""
        try:
            expect(await self._ask(self._requests.return_ticket(ticket, fate, reason, trajectories)), Done)
        finally:
            self._holding.pop(ticket, None)

    # --- the socket ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give up the connection and every waiting request."""
        self._drop()
        for future in self._waiting.values():
            future.cancel()
        self._context.term()

    async def __aenter__(self) -> AsyncBufferClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, request: AnyRequest, frames: Sequence[Frame] = ()) -> AnyReply:
        parts = [encode(request), *frames]
        patience = Patience(self._deadline_s, self._resend_s)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.request] = future
        try:
            while True:
                if self._socket is None:
                    self._open()
                connection = self._connection
                if self._socket is not None:
                    await self._socket.send_multipart(parts, copy=False)
                wait = patience.next_wait()
                if wait is None:
                    raise patience.exceeded(request, self._address)
                if await self._answered(future, wait):
                    return future.result()
                if self._connection == connection:
                    self._drop()
        finally:
            self._waiting.pop(request.request, None)

    async def _answered(self, future: asyncio.Future[AnyReply], wait_s: float) -> bool:
        """Wait for the answer, less long if the buffer is found to listen elsewhere."""
        end = time.monotonic() + wait_s
        while (left := end - time.monotonic()) > 0:
            done, _ = await asyncio.wait([future], timeout=min(left, LOOK_S))
            if done:
                return True
            if self._find() not in (None, self._endpoint):
                return False
        return False

    def _open(self) -> None:
        endpoint = self._find()
        if endpoint is None:
            return
        self._endpoint = endpoint
        self._address = endpoint.address
        self._connection += 1
        self._socket = connect(self._context.socket(zmq.DEALER), endpoint, self._keys)
        self._reader = asyncio.create_task(self._read(self._socket))

    def _drop(self) -> None:
        """Forget the connection with what still waits in it; the next one may find a buffer at another address."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            first, *_ = await socket.recv_multipart()
            try:
                reply = decode_reply(first)
            except NOT_A_MESSAGE as error:
                log.warning("an answer that makes no sense: %s", error)
                continue
            future = self._waiting.get(reply.request)
            if future is not None and not future.done():
                future.set_result(reply)
