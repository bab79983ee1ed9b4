"""How a run stands, from the ends of its folder's files only: a long run costs as little as a new one."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from moe_asyncrl.telemetry.jsonl import JsonlTail
from moe_asyncrl.telemetry.live_state import LiveState, read_state
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import Summary

METRICS_BYTES = 4 * 1024 * 1024
"""End of `metrics.jsonl` that is read at first: some thousand steps."""
EVENTS_BYTES = 2 * 1024 * 1024
LOG_BYTES = 16 * 1024
LOGS = 64
"""Logs looked at, the newest ones first."""
WARNINGS = 3
STEPS_KEPT = 64
PACE_STEPS = 20
RATE_S = 30.0
"""An engine's rate is taken over so many seconds."""
SILENT_S = 30.0
"""A run whose state is older than this, in seconds, and that has not ended, is called silent."""

_WARNING = re.compile(r"^\S+ \S+ (?:WARNING|ERROR|CRITICAL) [\w.]+: (.+)$")


@dataclass(frozen=True)
class EngineView:
    """One engine. None: not known."""

    name: str
    state: str | None
    """`joining`, `serving`, `quarantined`, or `gone` when the run does not know it any more."""
    version: int | None
    silent_s: float | None
    """Since its last sign of life, in seconds."""
    updated_s: float | None
    """Since its weights were last updated, in seconds."""
    tokens_per_s: float | None
    """Sampled, over the last half minute."""
    starts: int = 1


@dataclass(frozen=True)
class View:
    """One look at a run. The dicts are the newest records of `metrics.jsonl` of each kind; empty if there is none."""

    path: Path
    now: float
    status: str
    """`starting`, `warm-up`, `running`, `finishing`, `silent`, `ok`, `stopped` or `failed`."""
    total_steps: int
    error: str | None = None
    step: dict[str, Any] = field(default_factory=dict)
    warmup: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    eval: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    """Of the last steps, oldest first."""
    pace_s: float | None = None
    """Median time of the last steps, in seconds."""
    state: LiveState | None = None
    summary: Summary | None = None
    engines: tuple[EngineView, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """The run has ended."""
        return self.summary is not None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the last ones."""
        if self.pace_s is None or self.over:
            return None
        return self.pace_s * max(0, self.total_steps - int(self.step.get("step", 0)))


class RunLook:
    """Looks at one run again and again; each look reads only what is new."""

    def __init__(self, folder: RunFolder, total_steps: int) -> None:
        self._folder = folder
        self._total = total_steps
        self._metrics = JsonlTail.from_end(folder.metrics_path, last_bytes=METRICS_BYTES)
        self._events = JsonlTail.from_end(folder.events_path, last_bytes=EVENTS_BYTES)
        self._newest: dict[str, dict[str, Any]] = {}
        self._steps: deque[tuple[float, float | None]] = deque(maxlen=STEPS_KEPT)
        self._updated: dict[str, tuple[int, float]] = {}
        self._generated: dict[str, deque[tuple[float, float]]] = {}
        self._warnings = Warnings(folder)

    def look(self, now: float) -> View:
        """The run at `now`, Unix seconds."""
        self._read_metrics()
        self._read_events(now)
        state, summary = read_state(self._folder), read_summary(self._folder)
        new = self._newest
        status, error = status_of(state, summary, new, now)
        return View(
            path=self._folder.path,
            now=now,
            status=status,
            error=error,
            total_steps=self._total,
            step=new.get("step", {}),
            warmup=new.get("warmup", {}),
            rollout=new.get("rollout", {}),
            probe=new.get("probe", {}),
            eval=new.get("eval", {}),
            rewards=tuple(r for _, r in self._steps if r is not None),
            pace_s=pace([t for t, _ in self._steps]),
            state=state,
            summary=summary,
            engines=self._engines(state, summary is not None, now),
            warnings=self._warnings.last(),
        )

    def _read_metrics(self) -> None:
        for m in self._metrics.read():
            kind = m.get("kind")
            if not isinstance(kind, str):
                continue
            self._newest[kind] = m
            time, reward = m.get("time"), m.get("reward")
            if kind == "step" and isinstance(time, int | float):
                self._steps.append((float(time), float(reward) if isinstance(reward, int | float) else None))

    def _read_events(self, now: float) -> None:
        for e in self._events.read():
            span, end = e.get("span"), e.get("end")
            if not isinstance(end, int | float):
                continue
            if span == "update" and "error" not in e and isinstance(e.get("version"), int):
                for name in e.get("engines") or ():
                    self._updated[str(name)] = (int(e["version"]), float(end))
            elif span == "generate" and isinstance(e.get("tokens"), int | float):
                recent = self._generated.setdefault(str(e.get("engine", "")), deque(maxlen=4096))
                recent.append((float(end), float(e["tokens"])))

    def _engines(self, state: LiveState | None, over: bool, now: float) -> tuple[EngineView, ...]:
        known = {e.name: e for e in state.engines} if state is not None else {}
        found = []
        for name in sorted({*known, *self._updated}, key=natural):
            e, updated = known.get(name), self._updated.get(name)
            found.append(
                EngineView(
                    name=name,
                    state=None if over else e.state if e is not None else "gone",
                    version=e.version if e is not None and e.version >= 0 else updated[0] if updated else None,
                    silent_s=None if e is None or over else max(0.0, now - e.heartbeat),
                    updated_s=None if updated is None or over else max(0.0, now - updated[1]),
                    tokens_per_s=None if over else self._rate(name, now),
                    starts=e.incarnation + 1 if e is not None else 1,
                )
            )
        return tuple(found)

    def _rate(self, engine: str, now: float) -> float | None:
        recent = self._generated.get(engine)
        return sum(n for end, n in recent if end > now - RATE_S) / RATE_S if recent else None


class Warnings:
    """The newest warnings and errors in the logs of the roles (not those of SGLang's own processes)."""

    def __init__(self, folder: RunFolder) -> None:
        self._logs = folder.logs
        self._sizes: dict[str, int] = {}
        self._found: dict[str, list[str]] = {}

    def last(self) -> tuple[str, ...]:
        """At most a few lines, oldest first: `role: message`."""
        try:
            logs = [(p, p.stat()) for p in self._logs.glob("*.log") if not p.name.endswith("-sglang.log")]
        except OSError:
            return ()
        for path, stat in sorted(logs, key=lambda entry: -entry[1].st_mtime)[:LOGS]:
            if self._sizes.get(path.stem) != stat.st_size:
                self._sizes[path.stem] = stat.st_size
                self._found[path.stem] = warnings_in(tail_text(path, LOG_BYTES))
        lines = sorted((line, role) for role, found in self._found.items() for line in found)
        return tuple(f"{role}: {line.partition(chr(9))[2]}" for line, role in lines[-WARNINGS:])


def warnings_in(text: str) -> list[str]:
    """`time<TAB>message` of each line of a role's log that warns; times sort as text."""
    found = []
    for line in text.splitlines():
        if match := _WARNING.match(line):
            found.append(f"{line[:23]}\t{match.group(1)}")
    return found[-WARNINGS:]


def tail_text(path: Path, limit: int) -> str:
    """The last `limit` bytes of a file as text; empty if it cannot be read."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, f.seek(0, 2) - limit))
            return f.read().decode("utf-8", "replace")
    except OSError:
        return ""


def read_summary(folder: RunFolder) -> Summary | None:
    """`summary.json`; None while the run goes on."""
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError):
        return None


def status_of(
    state: LiveState | None, summary: Summary | None, newest: dict[str, dict[str, Any]], now: float
) -> tuple[str, str | None]:
    """(status, error) of a `View`."""
    if summary is not None:
        return summary.status, summary.error
    if state is None:
        return "starting", None
    if state.phase == "failed":
        return "failed", state.error
    if now - state.time > SILENT_S:
        return "silent", f"no sign of life for {now - state.time:.0f} s"
    if state.phase == "starting" and newest and newest.keys() <= {"warmup"}:
        return "warm-up", None
    return state.phase, None


def pace(times: Iterable[float]) -> float | None:
    """Median seconds between the last steps: a pause of the run (a resume) does not count. None before the second."""
    last = list(times)[-PACE_STEPS - 1 :]
    between = [b - a for a, b in itertools.pairwise(last) if b >= a]
    return statistics.median(between) if between else None


def natural(name: str) -> tuple[str, int]:
    """Sorts `engine-2` before `engine-10`."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, -1)
