"""Looking back at a run of a user's: report, trace and samples, by command, from its folder alone."""

from __future__ import annotations

import gzip
import json

from tests.browser.fixtures import Open
from tests.system.command import events, metrics, run_command
from tests.system.user_run import STEPS, Done
from tests.telemetry.pages import drawn, readable


def test_the_report_shows_what_the_run_measured(done: Done, open_page: Open) -> None:
    said = run_command(done.home, "report", "runs/latest", "--out", "report.html")
    assert (said.code, said.out, said.err) == (0, "report.html\n", ""), said
    with open_page(done.home / "report.html", width=390) as page:
        charts = drawn(page)
        readable(page)
    steps = metrics(done.folder, "step")
    assert charts["reward"][0]["y"] == [m["reward"] for m in steps]
    assert {t["name"] for t in charts["kl"]} == {"with replay", "without replay"}
    assert {t["name"] for t in charts["timeline"]} >= {"engine-0 samples", "trainer-0 trains"}
    assert len(charts["load_sampler"][0]["z"]) == len(charts["load_trainer"][0]["z"]) == 2
    assert sum(n for t in charts["staleness"] for _, n in t["customdata"]) == sum(m["sequences"] for m in steps)


def test_the_trace_holds_every_span(done: Done) -> None:
    said = run_command(done.home, "trace", "runs/latest", "--out", "trace.json.gz")
    assert said.code == 0 and said.out.startswith("trace.json.gz: "), said
    found = json.loads(gzip.decompress((done.home / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(e["ph"] == "X" for e in found) == len(events(done.folder))
    assert run_command(done.home, "trace", "runs/latest", "--from", "99").code == 2


def test_samples_are_what_was_trained(done: Done) -> None:
    """A group of each step, with the rewards of the user's function and a version for each sampled token."""
    said = run_command(done.home, "samples", "runs/latest", "--json", "--tokens", "--limit", "1000")
    assert said.code == 0, said
    found = [json.loads(line) for line in said.out.splitlines()]
    assert [s["step"] for s in found] == sorted((s["step"] for s in found), reverse=True)
    assert {s["step"] for s in found} == set(range(1, STEPS + 1))
    highest = {m["step"]: m["staleness_max"] for m in metrics(done.folder, "step")}
    for s in found:
        assert s["reward"] >= 1.0 and 0 <= s["staleness"] <= highest[s["step"]]
        assert str(eval(s["prompt"].partition("<user>")[2].partition("=?")[0])) == s["answer"]
        sampled = [t for t in s["tokens"] if t["logprob"] is not None]
        assert len(sampled) == s["sampled_tokens"] and all(t["logprob"] <= 0 for t in sampled)
        assert "".join(t["text"] for t in sampled) == s["completion"]
        assert [min(t["version"] for t in sampled), max(t["version"] for t in sampled)] == s["versions"]
    one = run_command(done.home, "samples", "runs/latest", "--step", str(STEPS), "--limit", "1")
    assert one.code == 0 and one.out.startswith(f"step {STEPS}  group ") and one.out.count("completion") == 1
    assert run_command(done.home, "samples", "runs/latest", "--step", "99").code == 2
