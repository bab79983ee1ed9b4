"""Spans and their overlap."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.telemetry.busy import Busy
from moe_asyncrl.telemetry.jsonl import JsonlTail, read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.spans import overlap, span
from moe_asyncrl.telemetry.summary import TrajectoryCounts, summarize

interval = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (float(p[0]), float(p[0] + p[1])))


@given(st.lists(interval, max_size=12), st.lists(interval, max_size=12))
def test_overlap_equals_counting_seconds(busy: list[tuple[float, float]], inside: list[tuple[float, float]]) -> None:
    def seconds(intervals: list[tuple[float, float]]) -> set[int]:
        return {s for a, b in intervals for s in range(int(a), int(b))}

    found = overlap(Busy.of(busy), Busy.of(inside))
    within = seconds(inside)
    if not within:
        assert found is None
    else:
        assert found == pytest.approx(len(seconds(busy) & within) / len(within))
    assert {s for a, b in zip(*Busy.of(busy).intervals(), strict=True) for s in range(int(a), int(b))} == seconds(busy)


def test_a_span_is_recorded_also_when_its_body_raises(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError), span(folder.events, "trainer-0", "step", step=3) as fields:
        fields["tokens"] = np.int64(7)
        raise ValueError("planted")
    (event,) = read_jsonl(folder.events_path)
    assert (event["role"], event["span"], event["step"], event["tokens"]) == ("trainer-0", "step", 3, 7)
    assert "planted" in event["error"]
    assert event["start"] <= event["end"] <= time.time()


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"a":1}\n{"a":')
    assert tail.read() == [{"a": 1}]
    with path.open("ab") as f:
        f.write(b"2}\n")
    assert tail.read() == [{"a": 2}]


def test_the_summary_sums_up_what_was_recorded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for m in (
        {"kind": "eval", "accuracy": 0.25, "version": 0, "n": 4},
        {
            "kind": "step",
            "step": 1,
            "coverage": 1.0,
            "coverage_same_version": 0.5,
            "replay_rows": 10,
            "staleness_max": 1,
        },
        {
            "kind": "step",
            "step": 2,
            "coverage": 0.5,
            "coverage_same_version": 0.5,
            "replay_rows": 30,
            "staleness_max": 2,
        },
        {"kind": "probe", "kl_replay": 1e-4, "kl_live": 3e-4, "tokens": 10},
        {"kind": "probe", "kl_replay": 2e-4, "kl_live": 5e-4, "tokens": 30},
        {"kind": "eval", "accuracy": 0.75, "version": 2, "n": 4},
    ):
        folder.metrics.append(m)
    for e in (
        {"role": "engine", "span": "generate", "start": 0.0, "end": 10.0},
        {"role": "rollout-0", "span": "generate", "start": 12.0, "end": 14.0},
        {"role": "trainer-0", "span": "step", "start": 11.0, "end": 15.0},
        {"role": "trainer-0", "span": "update", "start": 15.0, "end": 16.0, "version": 0},
        {"role": "trainer-0", "span": "update", "start": 15.0, "end": 16.0, "version": 1},
        {"role": "trainer-0", "span": "update", "start": 15.0, "end": 16.0, "version": 2, "error": "no engine"},
    ):
        folder.events.append(e)
    s = summarize(folder, status="ok", error=None, seconds=16.0, counts=TrajectoryCounts(sampled=8))
    assert (s.steps, s.accuracy_before, s.accuracy_after, s.weight_versions) == (2, 0.25, 0.75, 2)
    assert s.replay_coverage == pytest.approx(25 / 40)
    assert s.coverage_same_version == pytest.approx(0.5)
    assert s.kl_replay == pytest.approx(1.75e-4)
    assert s.kl_live == pytest.approx(4.5e-4)
    assert s.overlap == pytest.approx(0.5)
    assert s.staleness_max == 2
