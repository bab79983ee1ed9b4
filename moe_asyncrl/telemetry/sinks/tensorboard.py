"""TensorBoard events, by TensorBoard's own writer: no TensorFlow, no torch.

`tensorboard/run` holds steps, evaluations and probes over the steps of the run, `tensorboard/warmup` the supervised
steps before. Steps that are done again are taken back by a session's start in the event file, which TensorBoard reads
as "what stands at this step or behind it is void".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_asyncrl.telemetry.sinks.feed import Position
from moe_asyncrl.telemetry.sinks.points import Point


class TensorBoardSink:
    """Writes event files under one folder."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._resumed: dict[str, int] = {}

    def open(self, position: Position, *, fresh: bool) -> str:
        """Remove what a feed without a memory left behind; else void what was written after the position was kept."""
        if fresh:
            for old in self._folder.glob("*/events.out.tfevents.*"):
                old.unlink()
        for group, step in position.last.items():
            name = place(group)
            self._resumed[name] = max(step + 1, self._resumed.get(name, 0))
        return ""

    def rewind(self, group: str, step: int) -> bool:
        """Void everything at `step` and behind it."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer(place(group)).add_event(
            Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
        )
        return True

    def write(self, point: Point) -> None:
        """All figures of a point as one event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars.items()]
        for tag, counts in point.histograms.items():
            values.append(Summary.Value(tag=tag, histo=HistogramProto(**histogram(counts))))
        self._writer(place(point.group)).add_event(
            Event(wall_time=point.time, step=point.step, summary=Summary(value=values))
        )

    def flush(self) -> None:
        """Write to the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            _wait_for_a_later_name(self._folder / name)
            self._writers[name] = EventFileWriter(str(self._folder / name), max_queue_size=1000)
            if name in self._resumed:
                self.rewind(name, self._resumed.pop(name))
        return self._writers[name]


def _wait_for_a_later_name(folder: Path) -> None:
    """Readers take event files in the order of their names, which hold the second they were made in: it must be new."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdigit()), default=0)
    if 0 <= newest - time.time() + 1 <= 2:
        time.sleep(newest - time.time() + 1)


def place(group: str) -> str:
    """The folder of a group's events."""
    return "warmup" if group == "warmup" else "run"


def histogram(counts: Sequence[float]) -> dict[str, Any]:
    """Fields of TensorBoard's histogram of whole numbers: `counts[k]` things had the value k, in [k - 1/2, k + 1/2)."""
    total = sum(counts)
    present = [k for k, n in enumerate(counts) if n > 0]
    return {
        "min": float(present[0]) if present else 0.0,
        "max": float(present[-1]) if present else 0.0,
        "num": total,
        "sum": sum(k * n for k, n in enumerate(counts)),
        "sum_squares": sum(k * k * n for k, n in enumerate(counts)),
        "bucket_limit": [k + 0.5 for k in range(len(counts))],
        "bucket": list(counts),
    }
