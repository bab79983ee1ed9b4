"""Ports for servers that bind them later, in another process."""

from __future__ import annotations

import pathlib
import random
import socket

from moe_asyncrl.data.errors import UserError

EPHEMERAL_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 15000  # well-known services (and Slurm's 6817 to 6819) lie lower
FEWEST = 1000
TRIES = 50


def ephemeral_start(text: str) -> int:
    """The first port that the system itself gives away, from `ip_local_port_range` ("32768\\t60999")."""
    return int(text.split()[0])


def _binds(host: str, port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now, and that no other program is likely to take before it is bound.

    A server binds its port seconds after it was chosen. What the system hands out (to a bind to port 0, and to every
    outgoing connection) can be gone by then; so this is a random one below that range. Where the range leaves no room
    below, it is the system's choice.
    """
    try:
        end = ephemeral_start(EPHEMERAL_RANGE.read_text())
    except OSError:
        end = 0
    if end - LOWEST >= FEWEST:
        chance = random.SystemRandom()  # unlike the recipe's seed, never the same in two processes
        for _ in range(TRIES):
            if _binds(host, port := chance.randrange(LOWEST, end)):
                return port
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raises UserError if something listens on the port already."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise UserError(f"engine: port {port} on {host} is not free ({e.strerror}); choose another one") from None
