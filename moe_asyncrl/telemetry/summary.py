"""`summary.json`: the figures that others read, from the run folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from moe_asyncrl.telemetry.busy import Busy
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.spans import overlap


class TrajectoryCounts(msgspec.Struct, kw_only=True):
    """Trajectories by fate."""

    sampled: int = 0
    trained: int = 0
    stale: int = 0
    filtered: int = 0
    failed: int = 0


class Summary(msgspec.Struct, kw_only=True):
    """What a run came to. None means that it was not measured in this run."""

    status: Literal["ok", "failed", "stopped"]
    error: str | None = None
    steps: int = 0
    seconds: float = 0.0
    accuracy_before: float | None = None
    """Mean reward of greedy answers to held-out prompts when first evaluated; an accuracy where rewards are 0 or 1."""
    accuracy_after: float | None = None
    """The same at the last evaluation."""
    weight_versions: int = 0
    replay_coverage: float | None = None
    coverage_same_version: float | None = None
    kl_replay: float | None = None
    kl_live: float | None = None
    overlap: float | None = None
    staleness_max: int | None = None
    trajectories: TrajectoryCounts = msgspec.field(default_factory=TrajectoryCounts)


def summarize(
    folder: RunFolder,
    *,
    status: Literal["ok", "failed", "stopped"],
    error: str | None,
    seconds: float,
    counts: TrajectoryCounts,
    since: float = 0.0,
) -> Summary:
    """Read metrics and events once and sum them up; a long run takes time for it, and no memory to speak of.

    Events that ended before `since` are left out.
    """
    s = Summary(status=status, error=error, seconds=seconds, trajectories=counts)
    rows = known = same = 0.0
    probes: list[dict[str, Any]] = []
    for m in read_jsonl(folder.metrics_path):
        kind = m.get("kind")
        if kind == "step":
            s.steps = max(s.steps, int(m["step"]))
            s.staleness_max = _max(s.staleness_max, m.get("staleness_max"))
            weight = float(m.get("replay_rows") or 0)
            if m.get("coverage") is not None and weight > 0:
                rows += weight
                known += weight * float(m["coverage"])
                same += weight * float(m.get("coverage_same_version") or 0.0)
        elif kind == "eval":
            if s.accuracy_before is None:
                s.accuracy_before = float(m["accuracy"])
            s.accuracy_after = float(m["accuracy"])
        elif kind == "probe":
            probes.append(m)
    if rows:
        s.replay_coverage, s.coverage_same_version = known / rows, same / rows
    s.kl_replay, s.kl_live = _token_mean(probes, "kl_replay"), _token_mean(probes, "kl_live")
    generating, stepping = Busy(), Busy()
    versions: set[int] = set()
    for block in _events(folder.events_path):
        late = [e for e in block if e.end >= since]
        for name, busy in (("generate", generating), ("step", stepping)):
            times = np.array([(e.start, e.end) for e in late if e.span == name]).reshape(-1, 2)
            busy.add(times[:, 0], times[:, 1])
        versions |= {e.version for e in late if e.span == "update" and e.error is None and e.version is not None}
    s.weight_versions = len(versions)
    s.overlap = overlap(generating, stepping)
    return s


class _Event(msgspec.Struct):
    """What the summary reads of a line of `events.jsonl`."""

    span: str
    start: float
    end: float
    version: int | None = None
    error: str | None = None


def _events(path: Path, block_lines: int = 50_000) -> Iterator[list[_Event]]:
    """All events, in blocks. A line that is none (a process died while it wrote) is passed over."""
    if not path.exists():
        return
    decode = msgspec.json.Decoder(_Event).decode
    block: list[_Event] = []
    with path.open("rb") as f:
        for line in f:
            try:
                block.append(decode(line))
            except msgspec.MsgspecError:
                continue
            if len(block) == block_lines:
                yield block
                block = []
    yield block


def _token_mean(probes: list[dict[str, Any]], name: str) -> float | None:
    known = [p for p in probes if p.get(name) is not None]
    tokens = sum(float(p["tokens"]) for p in known)
    return sum(float(p[name]) * float(p["tokens"]) for p in known) / tokens if tokens else None


def _max(a: int | None, b: Any) -> int | None:
    return a if b is None else int(b) if a is None else max(a, int(b))
