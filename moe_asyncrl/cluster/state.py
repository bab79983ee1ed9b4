"""One look at the run's state from outside the roles."""

from __future__ import annotations

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import RunState
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
