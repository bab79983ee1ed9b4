"""Figures of each role for Prometheus, from what a run wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_asyncrl.telemetry.live_state import write_state
from moe_asyncrl.telemetry.prometheus.collector import RoleCollector
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import TrajectoryCounts
from tests.telemetry.run_folders import NOW, engine, make_run, state, step
from tests.telemetry.scraped import served


def event(role: str, span: str, seconds: float, **fields: object) -> dict[str, object]:
    return {"role": role, "span": span, "start": NOW, "end": NOW + seconds, **fields}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = make_run(
        tmp_path,
        [
            {"kind": "warmup", "time": NOW, "step": 3, "of": 3, "loss": 0.5},
            step(1),
            step(2),
            {"kind": "probe", "time": NOW, "step": 2, "kl_replay": 1e-4, "kl_live": 3e-4, "tokens": 9},
            {"kind": "rollout", "time": NOW, "sampled_tokens_per_s": 77.0, "completions": 32, "reward_mean": None},
            {"kind": "eval", "time": NOW, "version": 2, "accuracy": 0.5},
        ],
        [
            event("trainer-0", "step", 2.0, step=1),
            event("trainer-0", "step", 1.0, step=2, error="boom"),
            event("trainer-1", "step", 5.0, step=1),
            event("rollout-0", "generate", 4.0, engine="engine-1", tokens=600, requests=16),
            event("rollout-0", "generate", 4.0, engine="engine-0", tokens=60, requests=8),
        ],
    )
    counts = TrajectoryCounts(sampled=40, trained=32, stale=4, filtered=2, failed=2)
    ill = engine(1, state="quarantined", version=-1, incarnation=2, heartbeat=NOW - 7)
    write_state(folder, state(version=2, step=2, held=3, capacity=12, counters=counts, engines=(engine(0), ill)))
    return folder


def test_the_trainer(folder: RunFolder) -> None:
    found = served(RoleCollector(folder, "trainer-0", from_start=True))
    name = "moe_asyncrl_trainer_"
    assert (found[name + "step"], found[name + "reward"], found[name + "loss"]) == (2, 0.002, -2 / 7)
    assert (found[name + "steps_total"], found[name + "tokens_total"]) == (2, 101 + 102)
    assert (found[name + "kl_replay"], found[name + "kl_live"], found[name + "warmup_step"]) == (1e-4, 3e-4, 3)
    assert (found[name + "update_seconds"], found[name + "pause_seconds"]) == (0.25, 0.125)
    role = "moe_asyncrl_role_"
    spans = [found[f"{role}{what}_total{{span=step}}"] for what in ("span_seconds", "spans", "span_errors")]
    assert spans == [3.0, 2.0, 1.0]
    other = served(RoleCollector(folder, "trainer-1", from_start=True))
    assert other[f"{role}span_seconds_total{{span=step}}"] == 5.0 and not any(name in n for n in other)


def test_the_rollout_the_engines_and_the_buffer(folder: RunFolder) -> None:
    rollout = served(RoleCollector(folder, "rollout-0", from_start=True))
    name = "moe_asyncrl_rollout_"
    assert (rollout[name + "tokens_per_second"], rollout[name + "completions_total"]) == (77, 32)
    assert (rollout[name + "accuracy"], rollout[name + "accuracy_version"], rollout[name + "tokens_total"]) == (
        0.5,
        2,
        660,
    )
    assert name + "reward" not in rollout, "what is not known is not served"
    ill = served(RoleCollector(folder, "engine-1", from_start=True, clock=lambda: NOW))
    name = "moe_asyncrl_engine_"
    assert [ill[name + n] for n in ("up", "version", "starts_total", "silence_seconds")] == [1, -1, 3, 7]
    assert (ill[name + "state{state=quarantined}"], ill[name + "state{state=serving}"]) == (1, 0)
    assert (ill[name + "tokens_total"], ill[name + "requests_total"]) == (600, 16)
    assert served(RoleCollector(folder, "engine-7"))[name + "up"] == 0
    buffer = served(RoleCollector(folder, "buffer"))
    name = "moe_asyncrl_buffer_"
    assert [buffer[name + n] for n in ("groups_held", "capacity_groups", "version", "step")] == [3, 12, 2, 2]
    fates = {fate: buffer[f"{name}trajectories_total{{fate={fate}}}"] for fate in ("sampled", "trained", "stale")}
    assert fates == {"sampled": 40, "trained": 32, "stale": 4}
    assert (buffer[name + "engines{state=serving}"], buffer[name + "engines{state=quarantined}"]) == (1, 1)
    assert (buffer[name + "phase{phase=running}"], buffer[name + "phase{phase=failed}"]) == (1, 0)


def test_a_new_process_counts_from_its_start(folder: RunFolder) -> None:
    collector = RoleCollector(folder, "trainer-0")
    assert served(collector)["moe_asyncrl_trainer_steps_total"] == 0
    folder.metrics.append(step(3))
    with folder.metrics_path.open("a") as f:
        f.write('rubbish\n{"kind": "step", "step": "x", "tokens": []}\n')
    folder.events.append(event("trainer-0", "step", 0.5))
    folder.events.append({"role": "trainer-0", "span": 3})
    collector.refresh()
    folder.metrics.append(step(4))
    found = served(collector)
    assert (found["moe_asyncrl_trainer_step"], found["moe_asyncrl_trainer_tokens_total"]) == (4, 103 + 104)
    assert found["moe_asyncrl_role_span_seconds_total{span=step}"] == 0.5


def test_before_anything_is_there(tmp_path: Path) -> None:
    for role in ("trainer-0", "rollout-0", "engine-0", "buffer"):
        assert all(value == 0 for value in served(RoleCollector(RunFolder(tmp_path), role)).values())
