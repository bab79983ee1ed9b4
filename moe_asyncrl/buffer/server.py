"""The buffer's socket: requests in, replies out, one after the other. A message that makes no sense is refused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from moe_asyncrl.buffer.codec import NOT_A_MESSAGE, decode_request, encode, request_number
from moe_asyncrl.buffer.endpoint import Endpoint
from moe_asyncrl.buffer.security import DOMAIN, KeyPair, KnownClients, guard_server
from moe_asyncrl.buffer.service import BufferService
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import AnyReply, Refused
from moe_asyncrl.data.wire import Frame

log = logging.getLogger(__name__)

MAX_PART = 1 << 30
"""Largest part of a message, in bytes. A peer that sends a larger one is disconnected."""
_SHARED_BELOW = 16384
"""ZeroMQ reads small parts into blocks that they share; a view of one would keep its whole block alive."""
TICK_S = 1.0


class BufferServer:
    """Serves one `BufferService` on one ROUTER socket."""

    def __init__(
        self,
        service: BufferService,
        *,
        address: str,
        keys: KeyPair | None = None,
        clients: frozenset[str] = frozenset(),
        max_part: int = MAX_PART,
    ) -> None:
        """`address`: ZeroMQ address; on TCP port `*` takes a free one. `keys`: the buffer's own, needed on TCP.

        `clients`: public keys that may talk to it.
        """
        if address.startswith("tcp:") and keys is None:
            raise ValueError("a buffer on TCP needs keys")
        self.service = service
        self.last_request = time.monotonic()
        """When the last request came, by the monotonic clock."""
        self._address = address
        self._keys = keys
        self._clients = clients
        self._max_part = max_part
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._zap: AsyncioAuthenticator | None = None

    def bind(self) -> Endpoint:
        """Listen. Call it inside the event loop. Raises `UserError` if the address cannot be had."""
        if self._keys is not None:
            self._zap = AsyncioAuthenticator(self._context)
            self._zap.start()
            self._zap.configure_curve_callback(DOMAIN, KnownClients(self._clients))
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_part)
        socket.setsockopt(zmq.RCVHWM, 4)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60000)
        if self._keys is not None:
            guard_server(socket, self._keys)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            raise UserError(f"the buffer cannot listen on {self._address}: {error.strerror}") from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return Endpoint(address=bound, public_key=self._keys.public if self._keys else None)

    async def serve(self) -> None:
        """Answer until cancelled."""
        assert self._socket is not None
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                parts = await self._socket.recv_multipart(copy=False)
                sender, *rest = parts
                reply, frames = self._reply([_own(p) for p in rest])
                await self._socket.send_multipart([sender.bytes, encode(reply), *frames], copy=False)
                if ticking.done():
                    ticking.result()
        finally:
            ticking.cancel()

    def close(self) -> None:
        """Stop listening."""
        if self._zap is not None:
            self._zap.stop()
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    def _reply(self, parts: Sequence[Frame]) -> tuple[AnyReply, Sequence[Frame]]:
        if not parts:
            return Refused(request=0, code="bad_request", reason="an empty message"), ()
        try:
            request = decode_request(parts[0])
        except NOT_A_MESSAGE as error:
            log.warning("a message that is no request: %s", error)
            number = request_number(parts[0])
            return Refused(request=number, code="bad_request", reason=f"not a request: {error}"[:500]), ()
        self.last_request = time.monotonic()
        return self.service.handle(request, parts[1:], time.time())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.service.tick(time.time())


def _own(part: zmq.Frame) -> Frame:
    return part.bytes if len(part.buffer) < _SHARED_BELOW else part.buffer
