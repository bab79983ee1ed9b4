"""CURVE keys of one run: who may talk to the buffer when its socket is on TCP.

The folder holds one key pair for the buffer and one for its clients, readable by the owner of the run alone. A client
without the clients' key is turned away by ZeroMQ before a byte of its messages is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import zmq

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import write_atomic

DOMAIN = "moe-asyncrl"
_BUFFER = "buffer.json"
_CLIENT = "client.json"


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """A CURVE key pair, each half as 40 characters of Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=…)"


def new_pair() -> KeyPair:
    """A fresh pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def ensure_keys(folder: Path) -> tuple[KeyPair, KeyPair]:
    """(buffer's, clients') keys of the run, made if they are not there. Folder mode 0700, files 0600."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(folder, 0o700)
    for name in (_BUFFER, _CLIENT):
        if not (folder / name).exists():
            write_atomic(folder / name, msgspec.json.encode(new_pair()), mode=0o600)
    return _read(folder / _BUFFER), client_keys(folder)


def client_keys(folder: Path) -> KeyPair:
    """The clients' keys of the run. Raises `UserError` if they are not there or not whole."""
    return _read(folder / _CLIENT)


def _read(path: Path) -> KeyPair:
    try:
        pair = msgspec.json.decode(path.read_bytes(), type=KeyPair)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: no CURVE key pair ({error})") from None
    if len(pair.public) != 40 or len(pair.secret) != 40:
        raise UserError(f"{path}: CURVE keys have 40 characters; remove the folder to make new ones")
    return pair


class KnownClients:
    """ZeroMQ asks here (ZAP) whether a client's public key is one of ours."""

    def __init__(self, public: frozenset[str]) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """True for a known key of our domain."""
        return domain == DOMAIN and key.decode() in self._public


def guard_server(socket: zmq.Socket[Any], keys: KeyPair) -> None:
    """Make a socket that is not bound yet a CURVE server of our domain."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)


def guard_client(socket: zmq.Socket[Any], keys: KeyPair, server_public: str) -> None:
    """Make a socket that is not connected yet a CURVE client of the server with that key."""
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public)
