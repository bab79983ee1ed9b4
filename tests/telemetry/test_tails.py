"""Tails of JSON lines: where they begin, what they pass over, and that a huge file costs as little as a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.telemetry.jsonl import LOOK_BACK, JsonlTail


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(max_size=6), max_size=12), last=st.integers(0, 200), whole=st.booleans())
def test_it_begins_with_the_first_line_that_starts_in_the_last_bytes(
    texts: list[str], last: int, whole: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = [json.dumps({"n": i, "text": t}).encode() + b"\n" for i, t in enumerate(texts)]
    data = b"".join(lines) + (b"" if whole else b'{"n": 99')
    path = tmp_path_factory.mktemp("tail") / "m.jsonl"
    path.write_bytes(data)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    expected = [i for i, start in enumerate(starts) if start >= len(data) - last] if last else []
    assert [m["n"] for m in JsonlTail.from_end(path, last_bytes=last).read()] == expected


def test_from_the_end_only_what_comes_then(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = JsonlTail.from_end(path)  # not there yet
    path.write_text('{"n": 1}\n')
    assert tail.read() == [{"n": 1}]
    path.write_text('{"n": "%s"}\n{"n": 2' % ("x" * 3 * LOOK_BACK))
    tail = JsonlTail.from_end(path)
    assert tail.read() == []
    with path.open("a") as f:
        f.write("}\n")
    assert tail.read() == [{"n": 2}]


def test_bad_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"n": 1}\nnonsense\n\xff\xfe\n\n[1, 2]\n7\n{"n": 2}\n')
    tail = JsonlTail(path)
    assert [m["n"] for m in tail.read()] == [1, 2]
    assert tail.bad == 4


def test_by_pieces_everything_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"n": i, "role": f"r-{i % 3}"}) + "\n" for i in range(500)))
    whole, some = JsonlTail(path), JsonlTail(path)
    found, picked = [], []
    while part := whole.read(100):
        assert len(part) < 20
        found += [m["n"] for m in part]
    while True:
        before = some.offset
        picked += [m["n"] for m in some.read(100, only=b'"r-1"')]
        if some.offset == before:
            break
    assert found == list(range(500)) and picked == list(range(1, 500, 3))
