"""What somebody saw who looked at a user's run while it ran, and what is there to look at afterwards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_asyncrl.telemetry.prometheus.collector import RoleCollector
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.sinks.points import NOT_FIGURES
from tests.cluster.terminal import Terminal
from tests.system.command import COMMAND, metrics, run_command, summary
from tests.system.user_run import STEPS, Done
from tests.telemetry.scraped import figures, served

DASHBOARDS = Path(__file__).resolve().parents[2] / "configs" / "dashboards"
ROLES = {"buffer", "engine-0", "engine-0-sglang", "rollout-0", "trainer-0"}


def test_a_panel_that_follows_the_run(done: Done) -> None:
    seen = done.seen
    assert seen.code == 0 and seen.cursor_shown
    # Pictures that were drawn to their end.
    panels = [frame for frame in seen.frames if any(line[:1] == "╰" and line[-1:] == "╯" for line in frame)]
    assert all({len(line) for line in panel if line[:1] in "╭│╰" and line} == {80} for panel in panels)
    text = ["\n".join(panel) for panel in panels]
    assert f"step 0/{STEPS}" in text[0] and " starting " in text[0]
    assert any("engine-0" in t and "serving" in t for t in text)
    last = text[-1]
    assert f"step {STEPS}/{STEPS}" in last and "100%" in last and " ok " in last and "coverage      1.000" in last
    assert sum(t.count("╭─") for t in text) == len(text), "one panel at a time"


def test_the_same_panel_afterwards_and_lines_without_a_terminal(done: Done) -> None:
    with Terminal([str(COMMAND), "top", "runs/latest", "--once"], cwd=done.home, columns=120) as terminal:
        assert terminal.wait(120) == 0
        lines = terminal.screen.all()
    assert f"step {STEPS}/{STEPS}" in "\n".join(lines) and {len(line) for line in lines if line} == {120}
    with Terminal([str(COMMAND), "top", "runs/latest", "--once"], cwd=done.home, term="dumb") as terminal:
        assert terminal.wait(120) == 0
        dumb = terminal.screen.all()
    said = run_command(done.home, "top", "runs/latest")
    assert said.code == 0 and said.err == ""
    plain = said.out.splitlines()
    assert plain[0].split()[:2] == ["ok", done.folder.resolve().name] and dumb[0] == plain[0]
    steps = [line for line in plain if line.startswith("step")]
    assert len(steps) == 1 and steps[0].startswith(f"step    {STEPS}/{STEPS}  reward ")
    wrong = run_command(done.home, "top", "runs")
    assert wrong.code == 2 and wrong.err == "moe-asyncrl: runs: not a run folder (no recipe.yaml in it)\n"


def test_the_run_says_that_it_is_over(done: Done) -> None:
    for name in ("control.json", "state.json"):
        assert json.loads((done.folder / name).read_text())["phase"] == "finished"


def test_tensorboard_has_the_metrics(done: Done) -> None:
    events = EventAccumulator(str(done.folder / "tensorboard" / "run"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    found = {tag: {s.step: s.value for s in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for kind, group, axis in (("step", "train", "step"), ("eval", "eval", "version"), ("probe", "probe", "step")):
        records = metrics(done.folder, kind)
        assert records
        names = {n for m in records for n, v in m.items() if n not in NOT_FIGURES and isinstance(v, int | float)}
        assert {t for t in found if t.startswith(f"{group}/")} == {f"{group}/{n}" for n in names}
        for name in names:
            wanted = {m[axis]: pytest.approx(m[name], rel=1e-6) for m in records if m.get(name) is not None}
            assert found[f"{group}/{name}"] == wanted, name
    histograms = {h.step: h.histogram_value for h in events.Histograms("train/staleness")}
    assert {n: list(h.bucket) for n, h in histograms.items()} == {
        m["step"]: m["staleness_histogram"] for m in metrics(done.folder, "step")
    }


def test_every_role_served_its_figures(done: Done) -> None:
    """Scraped while the run ran: each is what the run folder says of that moment."""
    seen = done.seen
    assert set(seen.scraped) == ROLES and seen.labels == {done.folder.resolve().name}
    found = {role: figures(text) for role, text in seen.scraped.items()}
    assert all(found[role]["process_resident_memory_bytes"] > 0 for role in ROLES - {"engine-0-sglang"})
    trainer = found["trainer-0"]
    at = {m["step"]: m for m in metrics(done.folder, "step")}[trainer["moe_asyncrl_trainer_step"]]
    for name, field in (("reward", "reward"), ("loss", "loss"), ("update_seconds", "publish_seconds")):
        assert trainer[f"moe_asyncrl_trainer_{name}"] == at[field]
    assert trainer["moe_asyncrl_trainer_steps_total"] == at["step"]
    assert found["engine-0"]["moe_asyncrl_engine_up"] == 1
    assert found["buffer"]["moe_asyncrl_buffer_capacity_groups"] == at["buffer_capacity"]
    assert (
        0
        < found["engine-0"]["moe_asyncrl_engine_tokens_total"]
        <= found["rollout-0"]["moe_asyncrl_rollout_tokens_total"]
    )
    assert list((done.folder / "endpoints" / "prometheus").iterdir()) == [], "addresses are taken back"


def test_the_figures_of_the_whole_run_are_the_summary(done: Done) -> None:
    """The same collectors over the finished run: where both speak of one figure, they say the same."""
    folder, came_to = RunFolder(done.folder), summary(done.folder)
    trainer, rollout, buffer = (
        served(RoleCollector(folder, role, from_start=True)) for role in ("trainer-0", "rollout-0", "buffer")
    )
    assert trainer["moe_asyncrl_trainer_step"] == trainer["moe_asyncrl_trainer_steps_total"] == came_to["steps"]
    assert trainer["moe_asyncrl_role_spans_total{span=update}"] == came_to["weight_versions"]
    assert trainer["moe_asyncrl_trainer_sequences_total"] == came_to["trajectories"]["trained"]
    assert trainer["moe_asyncrl_trainer_coverage"] == came_to["replay_coverage"] == 1.0
    assert rollout["moe_asyncrl_rollout_accuracy"] == came_to["accuracy_after"]
    for fate, n in came_to["trajectories"].items():
        assert buffer[f"moe_asyncrl_buffer_trajectories_total{{fate={fate}}}"] == n


def test_the_dashboard_asks_for_what_is_served(done: Done) -> None:
    served_names = {name.partition("{")[0] for text in done.seen.scraped.values() for name in figures(text)}
    dashboard = json.loads((DASHBOARDS / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked.append(dashboard["templating"]["list"][1]["definition"])
    names = {name for expr in asked for name in re.findall(r"\b(?:moe_asyncrl_|sglang:|process_)\w+", expr)}
    assert len(names) >= 20 and names <= served_names, names - served_names
    assert all(re.search(r"moe_asyncrl_|sglang:|process_", expr) for expr in asked)
