"""Where the buffer listens, written for the other roles, and the sockets that connect there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from moe_asyncrl.buffer.security import KeyPair, guard_client
from moe_asyncrl.data.errors import DeadlineExceeded
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic

S = TypeVar("S", bound=zmq.Socket[Any])


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `endpoints/buffer.json`."""

    address: str
    """ZeroMQ address."""
    public_key: str | None = None
    """The buffer's CURVE key; none on a Unix socket."""


Find = Callable[[], Endpoint | None]
"""Looks for the buffer now; None if it is not there. Asked again after a silence, as a new buffer has a new address."""

LOOK_S = 0.5
"""How often one who waits for an answer looks whether the buffer has moved, in seconds."""


def endpoint_file(folder: RunFolder) -> Path:
    """Where the buffer says where it listens."""
    return folder.endpoints / "buffer.json"


def write_endpoint(folder: RunFolder, endpoint: Endpoint) -> None:
    """Tell the other roles."""
    write_atomic(endpoint_file(folder), msgspec.json.encode(endpoint))


def finder(folder: RunFolder) -> Find:
    """Finds the buffer of a run."""

    def find() -> Endpoint | None:
        try:
            return msgspec.json.decode(endpoint_file(folder).read_bytes(), type=Endpoint)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    return find


def fixed(endpoint: Endpoint) -> Find:
    """Finds a buffer whose address is known."""
    return lambda: endpoint


def wait_for_endpoint(find: Find, deadline_s: float, what: str) -> Endpoint:
    """The endpoint, once it is there. Raises `DeadlineExceeded`. For use before an event loop runs."""
    end = time.monotonic() + deadline_s
    while (found := find()) is None:
        if time.monotonic() > end:
            raise DeadlineExceeded(f"{what}: the buffer did not say where it listens within {deadline_s:g} s")
        time.sleep(0.05)
    return found


def connect(socket: S, endpoint: Endpoint, keys: KeyPair | None) -> S:
    """Connect a DEALER that is not connected yet."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if endpoint.public_key is not None:
        if keys is None:
            raise ValueError("the buffer asks for keys, and none were given")
        guard_client(socket, keys, endpoint.public_key)
    socket.connect(endpoint.address)
    return socket
