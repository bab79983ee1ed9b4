"""`state.json`: the run's state for those who look on from outside, on this machine or over a shared file system."""

from __future__ import annotations

import msgspec

from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic
from moe_asyncrl.telemetry.summary import TrajectoryCounts


class EngineLook(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the run knows it."""

    name: str
    url: str
    incarnation: int
    """Rises each time that its server is started."""
    state: str
    """`joining`, `serving` or `quarantined`."""
    version: int
    """Weights that it serves; -1 before its first."""
    heartbeat: float
    """Unix time of its last sign of life, in seconds."""


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `state.json`."""

    schema: int = 1
    time: float
    """When it was written, Unix seconds."""
    phase: str
    """`starting`, `running`, `finishing`, `finished` or `failed`."""
    error: str | None = None
    epoch: int = 0
    version: int = -1
    """Committed policy version."""
    step: int = 0
    """Trainer steps done."""
    held: int = 0
    """Groups in the buffer."""
    capacity: int = 0
    """Groups that it may hold."""
    issued: int = 0
    """Groups that samplers may be working on."""
    counters: TrajectoryCounts = msgspec.field(default_factory=TrajectoryCounts)
    engines: tuple[EngineLook, ...] = ()


def write_state(folder: RunFolder, state: LiveState) -> None:
    """Replace `state.json`. Raises OSError."""
    write_atomic(folder.state_json, msgspec.json.encode(state), durable=False)


def read_state(folder: RunFolder) -> LiveState | None:
    """The state as last written; None if there is none, or none that this build can read."""
    try:
        state = msgspec.json.decode(folder.state_json.read_bytes(), type=LiveState)
    except (OSError, msgspec.MsgspecError):
        return None
    return state if state.schema == 1 else None
