"""What of the run's state outlives its process: one small file, always whole."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moe_asyncrl.control.state import ControlState
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Phase
from moe_asyncrl.telemetry.run_folder import write_atomic


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `control.json`."""

    schema: int = 1
    epoch: int
    holder: str
    phase: Phase
    error: str | None
    step: int
    version: int


def record_of(state: ControlState) -> ControlRecord:
    """What is kept of a state."""
    return ControlRecord(
        epoch=state.epoch,
        holder=state.holder,
        phase=state.phase,
        error=state.error,
        step=state.step,
        version=state.version,
    )


def close_record(path: Path, phase: Phase, error: str | None) -> None:
    """Write into `control.json` how the run ended, when its own process can no longer say so.

    Only for who has seen that process end. A file that is not there or cannot be read is left as it is.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ControlRecord)
    except (OSError, msgspec.MsgspecError):
        return
    if record.schema == 1:
        closed = msgspec.structs.replace(record, phase=phase, error=error)
        write_atomic(path, msgspec.json.format(msgspec.json.encode(closed), indent=2))


class ControlStore:
    """`control.json` of one run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: ControlRecord | None = None

    def load(self) -> ControlState:
        """The state to start from: a new life of the run that keeps only the epoch, so that leases go on rising.

        The holder is forgotten as well: what it had in the buffer is gone, so it must ask anew. Raises `UserError`
        if the file is there and cannot be read, because starting from epoch 0 would let an old trainer in.
        """
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=ControlRecord)
        except FileNotFoundError:
            return ControlState()
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(
                f"{self._path}: cannot be read ({error}); remove it if no trainer of this run is alive"
            ) from None
        if record.schema != 1:
            raise UserError(f"{self._path}: schema {record.schema}, this build reads 1")
        return ControlState(epoch=record.epoch)

    def save(self, state: ControlState) -> None:
        """Write what changed; does nothing if nothing of it did.

        Raises `UserError` if the file has a newer lease: then another copy of the run is at work, and this one is over.
        """
        record = record_of(state)
        if record == self._last:
            return
        newest = self._epoch_on_disk()
        if newest > record.epoch:
            raise UserError(
                f"{self._path}: another copy of this run has taken lease {newest}; this one had {record.epoch} and ends"
            )
        write_atomic(self._path, msgspec.json.format(msgspec.json.encode(record), indent=2))
        self._last = record

    def _epoch_on_disk(self) -> int:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ControlRecord).epoch
        except (OSError, msgspec.MsgspecError):
            return 0
