"""How a run stands, and the panel that shows it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from moe_asyncrl.telemetry.live_state import LiveState, read_state, write_state
from moe_asyncrl.telemetry.panel import draw, gauge, sparkline
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import Summary
from moe_asyncrl.telemetry.view import EngineView, RunLook, View, pace, status_of, warnings_in
from tests.telemetry.run_folders import NOW, engine, make_run, state, step


def text(view: View, width: int, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(draw(view, width=width, height=height))
    return captured.get().splitlines()


def event(span: str, ago_s: float, **fields: object) -> dict[str, object]:
    return {"role": "any", "span": span, "start": NOW - ago_s - 1, "end": NOW - ago_s, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = make_run(
        tmp_path / "demo-1",
        [
            {"kind": "rollout", "time": NOW, "sampled_tokens_per_s": 2011.4},
            {"kind": "eval", "time": NOW, "version": 40, "accuracy": 0.83, "n": 200},
            {"kind": "probe", "time": NOW, "step": 40, "kl_replay": 1.2e-4, "kl_live": 1.8e-4, "tokens": 9},
            *[step(n) for n in range(1, 42)],
        ],
        [
            event("update", 5, version=41, engines=["engine-0", "engine-10"]),
            event("update", 1, version=42, engines=["engine-0"], error="x"),
            event("generate", 8, engine="engine-0", tokens=600),
            event("generate", 98, engine="engine-0", tokens=999),
        ],
    )
    ill = engine(2, state="quarantined", version=-1)
    write_state(folder, state(engines=(ill, engine(0), engine(1, heartbeat=0.0))))
    folder.logs.mkdir()
    (folder.logs / "trainer-0.log").write_text(
        "2026-11-30 06:40:00,123 INFO moe_asyncrl.x: quiet\n"
        "2026-11-30 06:40:01,000 WARNING moe_asyncrl.x: [red] slow disk\n"
    )
    (folder.logs / "engine-0-sglang.log").write_text("2026-11-30 06:40:01,000 WARNING sglang: noise\n")
    return folder


def test_what_is_seen_of_a_run(folder: RunFolder) -> None:
    view = RunLook(folder, 120).look(NOW)
    assert (view.status, view.step["step"], view.pace_s, view.eta_s) == ("running", 41, 1.0, 79.0)
    assert view.eval["accuracy"] == 0.83 and len(view.rewards) == 41
    assert view.warnings == ("trainer-0: [red] slow disk",)
    by_name = {e.name: e for e in view.engines}
    assert list(by_name) == ["engine-0", "engine-1", "engine-2", "engine-10"]
    first = by_name["engine-0"]
    assert (first.state, first.version, first.updated_s, first.silent_s) == ("serving", 41, 5.0, 1.0)
    assert first.tokens_per_s == pytest.approx(600 / 30)
    assert by_name["engine-10"] == EngineView("engine-10", "gone", 41, None, 5.0, None)
    assert by_name["engine-2"].version is None and by_name["engine-1"].silent_s == NOW


def test_later_looks_read_what_is_new(folder: RunFolder) -> None:
    look = RunLook(folder, 120)
    look.look(NOW)
    folder.metrics.append(step(42, reward=0.5))
    with folder.metrics_path.open("a") as f:
        f.write("rubbish\n")
    folder.summary.write_bytes(msgspec.json.encode(Summary(status="failed", error="boom", steps=42, seconds=75)))
    view = look.look(NOW)
    assert (view.status, view.error, view.step["reward"], view.over, view.eta_s) == ("failed", "boom", 0.5, True, None)


def test_the_panel_tells_a_stranger(folder: RunFolder) -> None:
    lines = text(RunLook(folder, 120).look(NOW), 80)
    for part in (
        "demo-1",
        "step 41/120",
        " 34%",
        "ETA 1m19s",
        "reward        0.041",
        "accuracy      0.830 at version 40",
        "2,041 tok/s",
        "2,011 tok/s",
        "staleness      1.00 versions, max 2",
        "buffer       96/192",
        "coverage      1.000",
        "flips        0.0100",
        "KL          1.2e-04 with replay",
        "KL live     1.8e-04 without replay",
        "update         0.25 s",
        "! trainer-0: [red] slow disk",
        "running",
    ):
        assert any(part in line for line in lines), (part, lines)
    rows = [re.split(r"\s{2,}", line.strip("│ ")) for line in lines if "engine-" in line]
    assert rows[0] == ["engine-0", "serving", "41", "5s ago", "20", "1"]
    assert rows[1][1].startswith("silent") and rows[2][1] == "quarantined" and rows[3][1] == "gone"


@pytest.mark.parametrize("width", [60, 72, 80, 103, 104, 120, 149, 150, 160, 44, 50])
def test_it_fits_every_terminal(folder: RunFolder, width: int) -> None:
    look = RunLook(folder, 120)
    view = look.look(NOW)
    many = tuple(EngineView(f"engine-{i}", "serving", 41, 1.0, 2.0, 1e4) for i in range(99))
    ill = EngineView("engine-99", "quarantined", 40, 1.0, 2.0, None)
    for height, shown in itertools.product((12, 16, 24, 50), (view, dataclasses.replace(view, engines=(*many, ill)))):
        lines = text(shown, width, height)
        assert {len(line) for line in lines} == {width}
        columns = 1 if width < 56 else 2
        assert len(lines) <= max(height, 5 + 12 // columns), (width, height)
        if len(shown.engines) == 100 and height >= 24:
            assert any("quarantined" in line for line in lines) and any("more," in line for line in lines)
        assert not any("…" in line for line in lines if "more," not in line and "!" not in line), lines


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "new", [])
    look = RunLook(folder, 120)
    assert look.look(NOW).status == "starting" and "step 0/120" in "".join(text(look.look(NOW), 80))
    write_state(folder, state(phase="starting", version=-1, step=0, engines=(engine(0, state="joining", version=-1),)))
    folder.metrics.append({"kind": "warmup", "time": NOW, "step": 30, "of": 60, "loss": 1.5})
    lines = text(look.look(NOW), 80)
    assert look.look(NOW).status == "warm-up" and any("warm-up step 30/60" in line and " 50%" in line for line in lines)
    assert any("engine-0" in line and "joining" in line for line in lines)


def test_the_status_of_a_run() -> None:
    running = state()
    assert status_of(None, None, {}, NOW) == ("starting", None)
    assert status_of(running, None, {}, NOW) == ("running", None)
    assert status_of(running, None, {}, NOW + 45)[0] == "silent"
    assert status_of(state(phase="failed", error="boom"), None, {}, NOW + 1e6) == ("failed", "boom")
    assert status_of(running, Summary(status="stopped"), {}, NOW + 1e6) == ("stopped", None)


def test_small_pictures() -> None:
    assert sparkline([1, 2, 3, 8], 3) == "▁▂█" and sparkline([5.0], 8) == "" and sparkline([2.0, 2.0], 8) == "▁▁"
    assert gauge(96, 192, 8) == "████░░░░" and gauge(5, 0, 8) == "" and gauge(None, 4, 8) == ""
    assert pace([0, 1, 2, 1000, 1001]) == 1.0 and pace([3.0]) is None
    assert warnings_in("2026-11-30 06:40:01,000 ERROR a.b: x\nnot a warning: ERROR\n") == ["2026-11-30 06:40:01,000\tx"]


def test_the_state_file_reads_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_state(folder) is None
    there = state(engines=(engine(0),))
    write_state(folder, there)
    assert read_state(folder) == there
    for bad in (b"", b"{}", msgspec.json.encode(msgspec.structs.replace(there, schema=2))):
        folder.state_json.write_bytes(bad)
        assert read_state(folder) is None
    assert LiveState(time=0.0, phase="running").engines == ()


def test_a_huge_run_costs_no_more_than_the_ends_of_its_files(tmp_path: Path) -> None:
    """Files of 8 GiB each (holes, but for their last lines): more than could be read, and more than fits in memory."""
    folder = make_run(tmp_path, [])
    for path in (folder.metrics_path, folder.events_path):
        with path.open("wb") as f:
            f.truncate(8 * 2**30)
            f.seek(0, 2)
            f.write(b"\n")
    for n in range(1, 50):
        folder.metrics.append(step(n))
        folder.events.append(event("update", 50 - n, version=n, engines=["engine-0"]))
    tracemalloc.start()
    view = RunLook(folder, 120).look(NOW)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert view.step["step"] == 49 and view.engines[0].version == 49
    assert peak < 32 * 2**20
