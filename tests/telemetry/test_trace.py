"""The trace keeps the rules of the Trace Event Format, and holds what the events hold."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_run import make_run
from moe_asyncrl.cluster.look_back import trace
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.trace import Lanes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("run") / "made"
    make_run(path, steps=40, events_per_step=30)
    return RunFolder(path)


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that keeps the format: what each kind must have, names before use, spans that nest."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    whole = json.loads(data)
    assert whole["displayTimeUnit"] in ("ms", "ns")
    processes, threads = set(), set()
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in whole["traceEvents"]:
        assert isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["args"], dict)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name") and list(e["args"]) == ["name"]
            processes.add(e["pid"])
            if e["name"] == "thread_name":
                threads.add((e["pid"], e["tid"]))
            continue
        assert isinstance(e["ts"], int) and e["pid"] in processes
        if e["ph"] == "X":
            assert isinstance(e["dur"], int) and e["dur"] >= 0 and (e["pid"], e["tid"]) in threads
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        else:
            assert e["ph"] == "C" and e["args"] and all(isinstance(v, int | float) for v in e["args"].values())
    for spans in tracks.values():
        check_nesting(spans)
    return list(whole["traceEvents"])


def check_nesting(spans: list[tuple[int, int]]) -> None:
    """Each two spans are disjoint, or one lies inside the other."""
    open_until: list[int] = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)


def test_the_check_sees_spans_that_cross() -> None:
    with pytest.raises(AssertionError):
        check_nesting([(0, 10), (5, 15)])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from("ab")), max_size=40))
def test_lanes_nest_whatever_comes(found: list[tuple[int, int, str]]) -> None:
    lanes = Lanes()
    placed = defaultdict(list)
    for start, length, name in sorted(found, key=lambda s: s[0] + s[1]):
        placed[lanes.place(start, start + length, name)].append((start, start + length))
    for spans in placed.values():
        check_nesting(spans)


def test_every_span_and_counter_is_there(made: RunFolder, tmp_path: Path) -> None:
    said = trace(str(made.path), None, None, None)
    path = made.path / "trace.json.gz"
    found = load(path)
    events = list(read_jsonl(made.events_path))
    assert said.startswith(f"{path}: {len(events):,} spans")
    names = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"}
    assert set(names.values()) == {"run", "engine-0", "engine-1", "engine-2", "engine-3", "trainer-0", "trainer-1"}
    want = Counter(
        (e.get("engine", e["role"]), e["span"], round(e["start"] * 1e6), round(e["end"] * 1e6)) for e in events
    )
    spans = [e for e in found if e["ph"] == "X"]
    assert Counter((names[e["pid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in spans) == want
    # An update holds its pause on the same track.
    own = [e for e in spans if names[e["pid"]] == "trainer-0"]
    assert {e["tid"] for e in own} == {1} and {e["name"] for e in own} == {"step", "update", "pause"}
    sampled = next(e for e in spans if e["name"] == "generate")
    assert sampled["args"].keys() == {"requests", "engine", "tokens", "asked by"}
    steps = [m for m in read_jsonl(made.metrics_path) if m["kind"] == "step"]
    counted = [(e["ts"], e["args"]["reward"]) for e in found if e["ph"] == "C" and e["name"] == "reward"]
    assert counted == [(round(m["time"] * 1e6), m["reward"]) for m in steps]
    assert {e["name"] for e in found if e["ph"] == "C"} >= {"staleness", "version", "buffer"}


@pytest.mark.parametrize(("first", "last"), [("11", "20"), ("50.0s", "70s"), (None, "5"), ("39", None)])
def test_a_window_holds_what_touches_it(made: RunFolder, tmp_path: Path, first: str | None, last: str | None) -> None:
    path = tmp_path / "part.json"
    trace(str(made.path), str(path), first, last)
    events = list(read_jsonl(made.events_path))
    steps = {m["step"]: m for m in read_jsonl(made.metrics_path) if m["kind"] == "step"}

    def moment(text: str | None, *, end: bool) -> float:
        if text is None:
            return float("inf") if end else 0.0
        if text.endswith("s"):
            return float(events[0]["start"]) + float(text[:-1])
        m = steps[int(text)]
        return float(m["time"]) - (0.0 if end else float(m["turn_seconds"]))

    a, b = moment(first, end=False), moment(last, end=True)
    want = sum(1 for e in events if e["end"] >= a and e["start"] <= b)
    assert 0 < want < len(events)
    assert sum(1 for e in load(path) if e["ph"] == "X") == want


@pytest.mark.parametrize("text", ["0", "41", "x", "3.5", "ys"])
def test_a_window_that_is_none(made: RunFolder, text: str) -> None:
    with pytest.raises(UserError, match="--from"):
        trace(str(made.path), None, text, None)


def test_an_empty_run_and_torn_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text("{}")
    trace(str(tmp_path), None, None, None)
    assert len(load(tmp_path / "trace.json.gz")) == 1
    whole = b'{"role":"trainer-0","span":"step","start":1.0,"end":2.0}\n'
    folder.events_path.write_bytes(whole + b'{"role":"tr' + whole + whole + b'{"role":')
    assert "2 spans" in trace(str(tmp_path), None, None, None)
    load(tmp_path / "trace.json.gz")
    with pytest.raises(UserError, match="not a run folder"):
        trace(str(tmp_path / "none"), None, None, None)
