"""The trainer's checkpoints as its loop sees them: at most one is on its way while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from moe_asyncrl.config.recipe import Checkpoint
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.telemetry.jsonl import JsonlWriter
from moe_asyncrl.telemetry.spans import span
from moe_asyncrl.train import checkpoint
from moe_asyncrl.train.build import TrainState
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo
from moe_asyncrl.train.checkpoint_write import Note

log = logging.getLogger(__name__)

Describe = Callable[[int, Cursor, Counters], CheckpointInfo]
"""What stands beside the weights and moments of a step."""


class CheckpointSaver:
    """One on each trainer rank; all ranks make the same calls in the same order.

    A checkpoint's cursor and account are those of the step it was begun at. Until it is complete a resume takes the
    one before, with the cursor of that one: what was trained in between is sampled and trained again, from the weights
    that had not seen it.
    """

    def __init__(
        self,
        state: TrainState,
        checkpoints: Path,
        describe: Describe,
        settings: Checkpoint,
        events: JsonlWriter,
        *,
        stall_s: float = 600.0,
    ) -> None:
        """`stall_s`: longest time in which a rank writes nothing, in seconds."""
        self._state, self._checkpoints, self._describe = state, checkpoints, describe
        self._settings, self._events, self._stall_s = settings, events, stall_s
        self._role = f"trainer-{state.model.rank}"
        self._begun: checkpoint.Begun | None = None

    def save(self, step: int, cursor: Cursor, counters: Counters) -> None:
        """Begin the checkpoint of `step`; training may go on afterwards. Without `asynchronous`, write it.

        Raises:
            UserError: this checkpoint or the one before could not be written.
        """
        self.finish()
        with span(self._events, self._role, "checkpoint", step=step):
            info = self._describe(step, cursor, counters)
            self._begun = checkpoint.begin(self._state, self._checkpoints, info, self._note(step))
            if not self._settings.asynchronous:
                self._complete()

    def poll(self) -> None:
        """Complete the checkpoint under way if all ranks have written; does not wait for that.

        Raises:
            UserError: a rank could not write.
        """
        if self._begun is not None and self._begun.writing.all_written():
            with span(self._events, self._role, "checkpoint_seal", step=self._begun.info.step):
                self._complete()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one, and complete it.

        Raises:
            UserError: a rank could not write.
        """
        if self._begun is not None:
            began = time.monotonic()
            step = self._begun.info.step
            with span(self._events, self._role, "checkpoint_seal", step=step):
                self._complete()
            log.info("waited %.1f s for the checkpoint of step %d", time.monotonic() - began, step)

    def _complete(self) -> None:
        assert self._begun is not None
        begun, self._begun = self._begun, None
        s = self._settings
        folder = checkpoint.finish(begun, keep=s.keep, keep_every=s.keep_every, stall_s=self._stall_s)
        log.info("complete: %s", folder)

    def _note(self, step: int) -> Note:
        def note(start: float, end: float, size: int, problem: str) -> None:
            fields = {"step": step, "bytes": size} | ({"error": problem[:300]} if problem else {})
            self._events.append({"role": self._role, "span": "checkpoint_write", "start": start, "end": end, **fields})

        return note
