"""A port chosen now is bound seconds later, by another process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from moe_asyncrl.engine import ports
from moe_asyncrl.engine.ports import EPHEMERAL_RANGE, LOWEST, check_port, ephemeral_start, free_port


def test_no_outgoing_connection_can_take_it() -> None:
    """Connections take ports of the system's own range: on a busy machine a server found its port taken that way."""
    end = ephemeral_start(EPHEMERAL_RANGE.read_text())
    chosen = [free_port() for _ in range(100)]
    assert all(LOWEST <= port < end for port in chosen)
    assert len(set(chosen)) > 90
    check_port("127.0.0.1", chosen[0])


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = iter([(taken := socket.create_server(("127.0.0.1", 0))).getsockname()[1], free_port()])

    class Draws:
        def randrange(self, start: int, end: int) -> int:
            return int(next(wanted))

    monkeypatch.setattr(ports.random, "SystemRandom", Draws)
    with taken:
        assert free_port() != taken.getsockname()[1]
    assert next(wanted, None) is None


@pytest.mark.parametrize("text", ["1024\t65535\n", "15500 65535\n", None])
def test_without_room_below_the_range_the_system_chooses(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", path)
    assert free_port() >= ephemeral_start(EPHEMERAL_RANGE.read_text())
