"""`report.html` in a real browser: every chart drawn, equal to the files, readable, and without network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_run import GROUPS, SIZE, make_run
from moe_asyncrl.cluster.look_back import report
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.busy import Busy
from moe_asyncrl.telemetry.frames import frame, sampled_lines
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.report.read import SCHEMA
from moe_asyncrl.telemetry.report.thin import POINTS, running_mean, thinned
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.browser.fixtures import Open
from tests.telemetry.pages import drawn, readable

STEPS = 50
Charts = dict[str, list[dict[str, Any]]]
CHARTS = {
    *("reward", "accuracy", "loss", "entropy", "grad_norm", "lr", "staleness", "kl", "flip_rate", "coverage"),
    *(
        "layer_flips",
        "imbalance",
        "evenness",
        "idle",
        "load_sampler",
        "load_trainer",
        "rates",
        "turn",
        "timeline",
        "busy",
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("run") / "made"
    make_run(path, steps=STEPS, events_per_step=30)
    report(str(path), None)
    return RunFolder(path)


@pytest.fixture(scope="module")
def charts(made: RunFolder, open_page: Open) -> Charts:
    """What the charts of the laptop's page hold; looked at for reading on the way, in the light and in the dark."""
    with open_page(made.path / "report.html") as page:
        found = drawn(page)
        readable(page)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("getComputedStyle(document.querySelector('#busy .xtick text')).fill.includes('232')")
        readable(page)
    return found


def test_every_chart_is_drawn_on_a_laptop(charts: Charts) -> None:
    assert charts.keys() == CHARTS


def test_every_chart_is_drawn_on_a_phone_in_the_dark(made: RunFolder, open_page: Open) -> None:
    with open_page(made.path / "report.html", width=390, scheme="dark") as page:
        assert drawn(page).keys() == CHARTS
        readable(page)
        text = page.inner_text("body")
    assert "0.200 → 0.900" in text and "90%" in text and "engine-1 (incarnation 0) is silent and left out" in text


def test_charts_hold_what_the_files_hold(made: RunFolder, charts: Charts) -> None:
    lines = list(read_jsonl(made.metrics_path))
    steps = [m for m in lines if m["kind"] == "step"]
    kinds = {k: [m for m in lines if m["kind"] == k] for k in ("eval", "probe", "rollout")}
    for name in ("reward", "loss", "entropy", "grad_norm", "lr", "flip_rate"):
        assert charts[name][0]["y"] == [m[name] for m in steps], name
        assert charts[name][0]["x"] == [m["step"] for m in steps]
    assert charts["accuracy"][0]["y"] == [m["accuracy"] for m in kinds["eval"]]
    assert [t["y"] for t in charts["kl"]] == [[m[k] for m in kinds["probe"]] for k in ("kl_replay", "kl_live")]
    assert [t["y"] for t in charts["coverage"]] == [
        [m[k] for m in steps] for k in ("coverage", "coverage_same_version")
    ]
    assert charts["rates"][1]["y"] == [m["sampled_tokens_per_s"] for m in kinds["rollout"]]
    for stale in range(3):
        shares = [m["staleness_histogram"][stale] / (GROUPS * SIZE) for m in steps]
        assert charts["staleness"][stale]["y"] == pytest.approx(shares)
    routing = list(read_jsonl(made.routing_path))
    assert charts["layer_flips"][0]["z"] == [[r["flips"][i] for r in routing] for i in range(4)]
    for side in ("load_sampler", "load_trainer"):
        want = [[8 * n / sum(counts) for n in counts] for counts in routing[-1][side]]
        np.testing.assert_allclose(charts[side][0]["z"], want)


def test_the_timelines_hold_the_events(made: RunFolder, charts: Charts) -> None:
    events = list(read_jsonl(made.events_path))
    began = events[0]["start"]
    steps = [m for m in read_jsonl(made.metrics_path) if m["kind"] == "step"][-12:]
    start, end = steps[0]["time"] - steps[0]["turn_seconds"], steps[-1]["time"]

    def pairs(who: str, span: str) -> list[tuple[float, float]]:
        return [(e["start"], e["end"]) for e in events if e["span"] == span and e.get("engine", e["role"]) == who]

    bars = {t["name"]: t for t in charts["timeline"]}
    for label, who, span in (
        ("trainer-0 trains", "trainer-0", "step"),
        ("engine-2 samples", "engine-2", "generate"),
        ("trainer-0 pauses engines", "trainer-0", "pause"),
    ):
        starts, ends = Busy.of((a, b) for a, b in pairs(who, span) if b >= start and a <= end).intervals()
        np.testing.assert_allclose(bars[label]["base"], starts - began, atol=1e-6)
        np.testing.assert_allclose(bars[label]["x"], ends - starts, atol=1e-6)
    cells = charts["busy"][0]
    last = max(e["end"] for e in events)
    for label, who, span in (("trainer-0 trains", "trainer-0", "step"), ("engine-0 samples", "engine-0", "generate")):
        row = np.array(cells["z"][cells["y"].index(label)])
        seconds = Busy.of(pairs(who, span)).seconds()
        assert row.mean() * (last - began) == pytest.approx(seconds, rel=0.01)


def test_a_run_that_failed_at_once_has_sentences(tmp_path: Path, open_page: Open) -> None:
    folder = RunFolder(tmp_path / "<i>run")
    folder.path.mkdir()
    folder.recipe.write_text("not: [a recipe")
    nasty = "model: </script><script>throw new Error('planted')</script>"
    folder.write_json(folder.summary, {"status": "failed", "error": nasty})
    folder.metrics_path.write_bytes(b'{"kind":"step","st')
    path = report(str(folder.path), str(tmp_path / "elsewhere" / "r.html"))
    with open_page(path, width=390) as page:
        assert drawn(page) == {}
        assert page.locator(".missing").count() == len(CHARTS)
        assert page.inner_text(".error") == nasty and page.inner_text("h1").startswith("<i>run")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_that_goes_on(tmp_path: Path, open_page: Open) -> None:
    """No summary yet, a line half-written, a failed span whose text looks like a script, and a step done twice."""
    folder = RunFolder(tmp_path / "run")
    make_run(folder.path, steps=30, events_per_step=10)
    folder.summary.unlink()
    folder.routing_path.unlink()
    folder.metrics.append({"kind": "step", "step": 30, "time": 1_700_000_095.0, "reward": 0.125})
    with folder.metrics_path.open("ab") as f:
        f.write(b'{"kind":"step","step":31,"rew')
    folder.events.append(
        {"role": "trainer-0", "span": "update", "start": 1_700_000_090.0, "end": 1_700_000_091.0, "error": "</script>"}
    )
    with open_page(report(str(folder.path), None)) as page:
        charts = drawn(page)
        assert charts["reward"][0]["x"] == list(range(1, 31)) and charts["reward"][0]["y"][-1] == 0.125
        assert "load_sampler" not in charts and "No probe has recorded" in page.inner_text("#load_sampler")
        assert "30 of 30" in page.inner_text("#figures") and "</script>" in page.inner_text("#problems")


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        report(str(tmp_path), None)
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(UserError, match="cannot be written"):
        report(str(tmp_path), "/proc/none/report.html")


# --- a long run ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    y = np.array(values)
    kept = thinned(y, most)
    assert len(kept) <= most + 2 and (np.diff(kept) > 0).all()
    assert kept[0] == 0 and kept[-1] == len(y) - 1
    assert y[kept].min() == y.min() and y[kept].max() == y.max()


def test_the_running_mean_is_a_mean() -> None:
    y = np.random.default_rng(0).normal(size=50)
    want = [y[max(0, i - 6) : i + 1].mean() for i in range(50)]
    np.testing.assert_allclose(running_mean(y, 7), want)


def test_a_long_run_makes_a_small_page(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path / "run", steps=6000, events_per_step=6)
    path = report(str(tmp_path / "run"), None)
    assert path.stat().st_size < 8e6
    with open_page(path) as page:
        charts = drawn(page)
    rewards = [m["reward"] for m in read_jsonl(tmp_path / "run" / "metrics.jsonl") if m["kind"] == "step"]
    assert len(charts["grad_norm"][0]["x"]) <= POINTS + 2
    assert max(charts["reward"][0]["y"]) == max(rewards) and min(charts["reward"][0]["y"]) == min(rewards)
    assert sum(n for t in charts["staleness"] for _, n in t["customdata"]) == 6000 * GROUPS * SIZE


def test_lines_that_are_none_are_passed_over_in_columns(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    good = [json.dumps({"kind": "step", "step": i, "reward": i / 7}) for i in range(200)]
    path.write_text("\n".join([*good[:50], '{"kind":"st' + good[50], "[1,2]", *good[51:], '{"kind":']))
    rows = frame(path, SCHEMA)
    assert rows["step"].to_list() == [i for i in range(200) if i != 50]
    assert rows["reward"].to_list() == [i / 7 for i in range(200) if i != 50]


@pytest.mark.parametrize("whole_below", [0, 10**9])
def test_sampled_lines_spread_over_the_file(tmp_path: Path, whole_below: int) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"step": i, "pad": "x" * (i % 17)}) + "\n" for i in range(1000)) + '{"st')
    steps = [r["step"] for r in sampled_lines(path, 50, whole_below=whole_below)]
    assert steps == sorted(set(steps)) and 40 <= len(steps) <= 51 and steps[-1] == 999 and steps[0] < 25
