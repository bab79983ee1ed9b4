"""`events.jsonl` in one pass: when each lane was busy, the spans of a stretch of time, and what failed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from moe_asyncrl.telemetry.busy import Busy, Times
from moe_asyncrl.telemetry.frames import frames

SCHEMA = {
    "role": pl.String,
    "span": pl.String,
    "start": pl.Float64,
    "end": pl.Float64,
    "engine": pl.String,
    "error": pl.String,
}
FAILED_KEPT = 100
STRETCH_KEPT = 20_000
"""Spans of the stretch that are kept, the newest ones."""


@dataclass(frozen=True, order=True)
class Lane:
    """Who did what: an engine samples, a role does everything else."""

    who: str
    span: str


@dataclass(frozen=True)
class Failed:
    """A span that ended with an error."""

    role: str
    span: str
    end: float
    """Unix seconds"""
    error: str


@dataclass
class Events:
    """All of a run's events, in the size of a page."""

    lanes: dict[Lane, Busy] = field(default_factory=dict)
    counts: dict[Lane, int] = field(default_factory=dict)
    stretch: dict[Lane, list[tuple[Times, Times]]] = field(default_factory=dict)
    """Starts and ends of the spans that touch the stretch."""
    failed: deque[Failed] = field(default_factory=lambda: deque(maxlen=FAILED_KEPT))
    """The last ones, oldest first."""
    failed_count: int = 0
    first: float | None = None
    last: float | None = None
    """First start and last end, Unix seconds."""

    @property
    def total(self) -> int:
        """Spans."""
        return sum(self.counts.values())


def read_events(path: Path, stretch: tuple[float, float] | None) -> Events:
    """Read all events. `stretch`: Unix seconds, from and to, of which spans are kept one by one."""
    found = Events()
    for block in frames(path, SCHEMA):
        block = block.filter(
            pl.col("role").is_not_null() & pl.col("span").is_not_null() & (pl.col("end") >= pl.col("start"))
        )
        if not block.height:
            continue
        who = pl.when(pl.col("span") == "generate").then(pl.col("engine").fill_null(pl.col("role")))
        block = block.with_columns(who.otherwise(pl.col("role")).alias("who"))
        _note_errors(found, block)
        first, last = float(block["start"].min()), float(block["end"].max())  # type: ignore[arg-type]
        found.first = first if found.first is None else min(found.first, first)
        found.last = last if found.last is None else max(found.last, last)
        for key, rows in block.select("who", "span", "start", "end").partition_by("who", "span", as_dict=True).items():
            lane = Lane(str(key[0]), str(key[1]))
            starts, ends = rows["start"].to_numpy(), rows["end"].to_numpy()
            found.lanes.setdefault(lane, Busy()).add(starts, ends)
            found.counts[lane] = found.counts.get(lane, 0) + len(starts)
            if stretch is not None:
                inside = (ends >= stretch[0]) & (starts <= stretch[1])
                if inside.any():
                    found.stretch.setdefault(lane, []).append(
                        (starts[inside][-STRETCH_KEPT:], ends[inside][-STRETCH_KEPT:])
                    )
    return found


def _note_errors(found: Events, block: pl.DataFrame) -> None:
    bad = block.filter(pl.col("error").is_not_null())
    found.failed_count += bad.height
    for role, span, end, error in bad.tail(FAILED_KEPT).select("role", "span", "end", "error").iter_rows():
        found.failed.append(Failed(role, span, end, error))
