"""Keeps some of what was trained, whole, for those who read it later: on a thread, bounded in memory and on disk."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from moe_asyncrl.buffer.service import Held
from moe_asyncrl.data.recorded import SUFFIX, RecordedGroup, encode_record, files_in

log = logging.getLogger(__name__)

WAITING = 16
"""Groups that may wait for the disk; what comes while so many wait is not recorded."""
FILES = 8
"""The bound on the disk is kept by dropping whole files of about this part of it."""
CLOSE_S = 10.0
"""Longest wait for the disk at the end, in seconds."""


class Recorder:
    """Writes some groups of each trained batch. Call it from one thread; it never waits for the disk."""

    def __init__(self, folder: Path, *, groups_per_step: int, limit_bytes: int) -> None:
        """Write at most `limit_bytes` into `folder`, counting what is there already; the oldest file goes first."""
        self._folder = folder
        self._groups = groups_per_step
        self._limit = limit_bytes
        self._waiting: queue.Queue[tuple[int, int, float, Held] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._stopped = False
        self.dropped = 0
        """Groups that were not recorded because the disk was too slow."""

    def __call__(self, step: int, version: int, groups: Sequence[Held]) -> None:
        """The batch of `step`, which began with weights `version`, is in the weights."""
        if self._stopped or not self._groups:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
            self._thread.start()
        now = time.time()
        # A batch is sorted by the age of its tokens, so its first groups would be the stalest ones.
        count = min(self._groups, len(groups))
        for group in (groups[(2 * i + 1) * len(groups) // (2 * count)] for i in range(count)):
            try:
                self._waiting.put_nowait((step, version, now, group))
            except queue.Full:
                self.dropped += 1

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_S` seconds."""
        if self._thread is not None and not self._stopped:
            self._stopped = True
            try:
                self._waiting.put(None, timeout=CLOSE_S)
                self._thread.join(CLOSE_S)
            except queue.Full:
                pass
            if self._thread.is_alive():
                log.warning("the disk did not take the last recorded trajectories within %g s", CLOSE_S)
        if self.dropped:
            log.warning("%d groups were not recorded: the disk was too slow", self.dropped)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._write(*item)
            except OSError as error:
                log.warning("trajectories are not recorded any more: %s", error)
                self._stopped = True
                return

    def _write(self, step: int, version: int, now: float, held: Held) -> None:
        group = RecordedGroup(
            step=step,
            version=version,
            index=held.ticket.index,
            attempt=held.ticket.attempt,
            time=now,
            headers=held.headers,
        )
        frames = [held.frames[h.identity.trajectory, spec.field] for h in held.headers for spec in h.frames]
        parts = encode_record(group, frames)
        size = sum(len(p) for p in parts)
        if size > self._limit:
            log.warning("group %d of step %d is not recorded: telemetry.record_mib is too small", group.index, step)
            return
        path = self._file_for(size)
        with path.open("ab") as f:
            f.writelines(parts)

    def _file_for(self, size: int) -> Path:
        """Where the next record goes, after what is too old was dropped to make room for it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files = files_in(self._folder)
        if self._path is None or self._path.stat().st_size + size > self._limit // FILES:
            number = int(files[-1].stem) + 1 if files else 0
            self._path = self._folder / f"{number:08d}{SUFFIX}"
            self._path.touch(exist_ok=False)
            files.append(self._path)
        sizes = {p: p.stat().st_size for p in files}
        while sum(sizes.values()) + size > self._limit and files[0] != self._path:
            del sizes[files[0]]
            os.unlink(files.pop(0))
        return self._path
