"""The buffer's process lets others look on: the run's state as a file, written beside its work."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from moe_asyncrl.data.messages import Counters, RunState
from moe_asyncrl.telemetry.live_state import EngineLook, LiveState, write_state
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import TrajectoryCounts

log = logging.getLogger(__name__)


def trajectory_counts(counters: Counters) -> TrajectoryCounts:
    """The account as files have it."""
    return TrajectoryCounts(**msgspec.structs.asdict(counters))


def live_state(state: RunState, now: float) -> LiveState:
    """The state as it is written at `now` (Unix seconds)."""
    return LiveState(
        time=now,
        phase=state.phase,
        error=state.error,
        epoch=state.epoch,
        version=state.version,
        step=state.step,
        held=state.held,
        capacity=state.capacity,
        issued=state.issued,
        counters=trajectory_counts(state.counters),
        engines=tuple(
            EngineLook(
                name=m.name,
                url=m.url,
                incarnation=m.incarnation,
                state=m.state,
                version=m.version,
                heartbeat=m.heartbeat,
            )
            for m in state.members
        ),
    )


class Look:
    """Writes `state.json` when it is asked to. A disk that refuses is named once and ends nothing."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._refused = False

    async def show(self, state: RunState) -> None:
        """Write the state, off the event loop: a shared file system may be slow."""
        try:
            await asyncio.to_thread(write_state, self._folder, live_state(state, time.time()))
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.warning("%s cannot be written: %s", self._folder.state_json, error)
            self._refused = True
