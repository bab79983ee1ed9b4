"""One look at the run's state from outside the roles."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.control.store import close_record
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import RunState
from moe_asyncrl.telemetry.live_state import read_state, write_state
from moe_asyncrl.telemetry.run_folder import RunFolder


def get_state(folder: RunFolder, *, deadline_s: float) -> RunState | None:
    """The state now; None if the buffer does not answer within `deadline_s` seconds."""
    try:
        client = BufferClient.connect(folder, sender="supervisor", deadline_s=deadline_s, start_s=deadline_s)
    except UserError:
        return None
    try:
        return client.state()
    except UserError:
        return None
    finally:
        client.close()


def close_state(folder: RunFolder, *, failed: bool, error: str | None) -> None:
    """Say in `control.json` and `state.json` how the run ended. Call it when all roles are gone."""
    phase: Literal["finished", "failed"] = "failed" if failed else "finished"
    reason = error if failed else None
    close_record(folder.control_json, phase, reason)
    last = read_state(folder)
    if last is not None:
        write_state(
            folder, msgspec.structs.replace(last, time=time.time(), phase=phase, error=reason, held=0, issued=0)
        )
