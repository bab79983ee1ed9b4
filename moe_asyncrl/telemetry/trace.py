"""A run as a trace that Perfetto and Chrome open: Trace Event JSON, written as it is read.

One process for each role and each engine; spans that lie inside each other nest, and what a role does at the same time
stands in lanes of its own. Counters come from the steps. Format: the Trace Event Format of Chrome, object form.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from moe_asyncrl.telemetry.run_folder import RunFolder

MOST_BYTES = 128 * 1024 * 1024
"""End of `events.jsonl` that is written without a window: about what a browser can still show."""
DISORDER_S = 60.0
"""Events stand in the order of their ends, up to this: clocks of machines, and lists that wait to be written."""
LONGEST_S = 3600.0
"""Spans that end later than this after a window are not looked for in it."""
KEPT = 256
"""Spans of a lane that a later one may contain or touch."""
COUNTERS = {
    "reward": ("reward",),
    "staleness": ("staleness_mean", "staleness_max"),
    "version": ("version",),
    "buffer": ("buffer_held",),
    "tokens/s trained": ("trained_tokens_per_s",),
}
"""Name of the counter -> fields of a step."""


@dataclass(frozen=True)
class Window:
    """Unix seconds; spans that touch it are written. None: open."""

    start: float | None = None
    end: float | None = None

    def touches(self, start: float, end: float) -> bool:
        """Whether a span from `start` to `end` is in it."""
        return (self.start is None or end >= self.start) and (self.end is None or start <= self.end)


@dataclass(frozen=True)
class Written:
    """What a trace holds."""

    spans: int
    cut: bool
    """Only the end of a long run was read."""


class _Event(msgspec.Struct):
    role: str
    span: str
    start: float
    end: float
    engine: str | None = None


_Step = msgspec.defstruct(
    "_Step",
    [("kind", str), ("time", float), *((f, float | None, None) for fields in COUNTERS.values() for f in fields)],
)


class Lanes:
    """Tracks of one process, on each of which spans are disjoint or inside each other. Spans come in order of ends."""

    def __init__(self) -> None:
        self._lanes: list[list[tuple[int, int, str]]] = []

    def place(self, start: int, end: int, name: str) -> int:
        """Number of the first lane that the span fits on. A span never holds another one of its own name."""
        number = next((i for i, lane in enumerate(self._lanes) if _fits(lane, start, name)), len(self._lanes))
        if number == len(self._lanes):
            self._lanes.append([])
        lane = self._lanes[number]
        while lane and lane[-1][0] >= start:
            lane.pop()
        lane.append((start, end, name))
        if len(lane) > 2 * KEPT:
            del lane[:KEPT]
        return number


def _fits(lane: list[tuple[int, int, str]], start: int, name: str) -> bool:
    for before, end, other in reversed(lane):
        if end <= start:
            return True
        if before < start or other == name:
            return False
    return True


def write_trace(folder: RunFolder, out: Path, window: Window) -> Written:
    """Write the trace of a run; with `.gz` in its name, compressed. Memory does not grow with the run.

    Without a window, of a very long run only the end is written. Raises OSError.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    spans = 0
    cut = False
    with out.open("wb") as raw, _compressed(raw, out.suffix == ".gz") as f:
        f.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        f.write(msgspec.json.encode(_name("process_name", 1, None, "run")))
        tracks = _Tracks()
        start = 0
        if window == Window() and folder.events_path.exists():
            start = max(0, folder.events_path.stat().st_size - MOST_BYTES)
            cut = start > 0
        elif window.start is not None:
            start = _place_of(folder.events_path, window.start - DISORDER_S)
        first: float | None = None
        for line, e in _lines(folder.events_path, start):
            if window.end is not None and e.end > window.end + LONGEST_S:
                break
            if e.end < e.start or not window.touches(e.start, e.end):
                continue
            first = e.end if first is None else first
            spans += 1
            for record in tracks.records(line, e):
                f.write(b",\n" + msgspec.json.encode(record))
        counted = Window(first, window.end) if cut else window
        for record in _counters(folder.metrics_path, counted):
            f.write(b",\n" + msgspec.json.encode(record))
        f.write(b"\n]}\n")
    return Written(spans, cut)


def _compressed(raw: BinaryIO, wanted: bool) -> gzip.GzipFile | contextlib.nullcontext[BinaryIO]:
    return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3) if wanted else contextlib.nullcontext(raw)


class _Tracks:
    """Numbers of processes and threads, and their names when they are first used."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._lanes: dict[int, Lanes] = {}
        self._named: set[tuple[int, int]] = set()

    def records(self, line: bytes, e: _Event) -> Iterator[dict[str, Any]]:
        who = e.engine if e.span == "generate" and e.engine else e.role
        pid = self._processes.get(who)
        if pid is None:
            pid = self._processes[who] = len(self._processes) + 2
            self._lanes[pid] = Lanes()
            yield _name("process_name", pid, None, who)
        # Both ends are rounded in the same way, so that what nests still nests.
        start, end = round(e.start * 1e6), round(e.end * 1e6)
        tid = self._lanes[pid].place(start, end, e.span) + 1
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            yield _name("thread_name", pid, tid, who if tid == 1 else f"{who} ({tid})")
        more = {k: v for k, v in msgspec.json.decode(line).items() if k not in ("role", "span", "start", "end")}
        if who != e.role:
            more["asked by"] = e.role
        record = {"ph": "X", "name": e.span, "cat": e.role, "pid": pid, "tid": tid, "ts": start, "dur": end - start}
        yield {**record, "args": more}


def _name(kind: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    where = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": kind, **where, "args": {"name": name}}


def _lines(path: Path, start: int) -> Iterator[tuple[bytes, _Event]]:
    if not path.exists():
        return
    decode = msgspec.json.Decoder(_Event).decode
    with path.open("rb") as f:
        f.seek(start)
        if start:
            f.readline()
        for line in f:
            try:
                yield line, decode(line)
            except msgspec.MsgspecError:
                continue


def _place_of(path: Path, moment: float, *, near: int = 64 * 1024) -> int:
    """A place in the file before which every span ended before `moment`, Unix seconds."""
    if not path.exists():
        return 0
    low, high = 0, path.stat().st_size
    while high - low > near:
        middle = (low + high) // 2
        following = next(_lines(path, middle), None)
        if following is not None and following[1].end < moment:
            low = middle
        else:
            high = middle
    return low


def _counters(path: Path, window: Window) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    decode = msgspec.json.Decoder(_Step).decode
    with path.open("rb") as f:
        for line in f:
            try:
                m: Any = decode(line)
            except msgspec.MsgspecError:
                continue
            if m.kind != "step" or not window.touches(m.time, m.time):
                continue
            for name, fields in COUNTERS.items():
                values = {field: v for field in fields if (v := getattr(m, field)) is not None}
                if values:
                    yield {"ph": "C", "name": name, "pid": 1, "ts": round(m.time * 1e6), "args": values}


def first_start(path: Path) -> float | None:
    """Start of the first event, Unix seconds; None without one. A run's seconds are counted from it."""
    return next((e.start for _, e in _lines(path, 0)), None)


class _Turn(msgspec.Struct):
    kind: str
    time: float
    step: int = 0
    turn_seconds: float | None = None
    step_seconds: float | None = None


def step_times(path: Path) -> dict[int, tuple[float, float]]:
    """When each step began and ended, Unix seconds; of a step that was done twice, the last time."""
    found: dict[int, tuple[float, float]] = {}
    if not path.exists():
        return found
    decode = msgspec.json.Decoder(_Turn).decode
    with path.open("rb") as f:
        for line in f:
            try:
                m = decode(line)
            except msgspec.MsgspecError:
                continue
            if m.kind == "step":
                found[m.step] = (m.time - (m.turn_seconds or m.step_seconds or 0.0), m.time)
    return found
