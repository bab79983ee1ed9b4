"""A run folder as a long run would leave it, made without running anything."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import Summary, TrajectoryCounts

BEGAN = 1_700_000_000.0
"""Unix time of its first event."""
STEP_S = 2.0
ENGINES = 4
GROUPS, SIZE = 64, 8
BLOCK = 2000
"""Steps whose lines are made at once."""


def make_run(path: Path, *, steps: int, events_per_step: int, layers: int = 4, experts: int = 8, seed: int = 0) -> None:
    """Write recipe, metrics, events, routing, one log and the summary of a run of `steps` steps."""
    folder = RunFolder(path)
    folder.logs.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    recipe = {
        "model": {"path": "models/made"},
        "data": {"train": "train.jsonl"},
        "run": {"steps": steps, "name": path.name},
        "rollout": {"groups_per_step": GROUPS, "group_size": SIZE},
        "engine": {"count": ENGINES},
        "trainer": {"dp": 2, "ep": 2},
    }
    folder.recipe.write_bytes(msgspec.json.encode(recipe))
    with folder.metrics_path.open("wb") as f:
        for first in range(0, steps, BLOCK):
            f.write(_metrics(first, min(BLOCK, steps - first), steps, rng))
    with folder.events_path.open("wb") as f:
        f.write(b'{"role":"engine-0","span":"engine_start","start":%f,"end":%f}\n' % (BEGAN, BEGAN + 30))
        for first in range(0, steps, BLOCK):
            f.write(_events(first, min(BLOCK, steps - first), events_per_step, rng))
    with folder.routing_path.open("wb") as f:
        for step in range(10, steps + 1, 10):
            f.write(_routing(step, layers, experts, rng))
    folder.log_path("buffer").write_text(
        "2023-11-14 22:13:20,000 INFO moe_asyncrl.buffer.role: listening\n"
        "2023-11-14 22:20:00,000 WARNING moe_asyncrl.buffer.service: engine-1 (incarnation 0) is silent and left out\n"
    )
    counts = TrajectoryCounts(sampled=(steps + 2) * GROUPS * SIZE, trained=steps * GROUPS * SIZE, stale=8)
    summary = Summary(
        status="ok",
        steps=steps,
        seconds=30 + steps * STEP_S,
        accuracy_before=0.2,
        accuracy_after=0.9,
        weight_versions=steps + 1,
        replay_coverage=1.0,
        coverage_same_version=0.95,
        kl_replay=3e-5,
        kl_live=4e-4,
        overlap=0.9,
        staleness_max=2,
        trajectories=counts,
    )
    folder.write_json(folder.summary, summary)


def _begins(first: int, count: int) -> np.ndarray:
    """Unix time at which each step begins, float64 [count]."""
    return BEGAN + 30.0 + STEP_S * np.arange(first, first + count)


def _metrics(first: int, count: int, steps: int, rng: np.random.Generator) -> bytes:
    encode = msgspec.json.encode
    lines: list[bytes] = []
    noise = rng.normal(size=(count, 4))
    stale = rng.multinomial(GROUPS * SIZE, [0.2, 0.7, 0.1], size=count).tolist()
    for i, begin in enumerate(_begins(first, count).tolist()):
        step, done = first + i + 1, (first + i) / max(1, steps - 1)
        a, b, c, d = noise[i].tolist()
        reward = min(1.0, max(0.0, 0.2 + 0.7 * (1 - math.exp(-4 * done)) + 0.05 * a))
        record = {
            "kind": "step",
            "time": begin + STEP_S,
            "step": step,
            "version": step,
            "loss": 0.01 * b,
            "grad_norm": 0.1 * math.exp(0.3 * c),
            "lr": 1e-4 * min(1.0, step / 10),
            "tokens": 1536 + int(50 * a),
            "sequences": GROUPS * SIZE,
            "positions": 4116,
            "padding": 0.0,
            "micro_batches": 1,
            "ratio_mean": 1.0,
            "ratio_max": 1.0,
            "clip_fraction": 0.0,
            "importance_mean": 0.998,
            "importance_max": 1.18,
            "importance_capped": 0.0,
            "logprob_gap": 0.0255,
            "logprob_gap_max": 0.19,
            "sampler_kl": 0.0009,
            "entropy": 1.6 * math.exp(-2 * done) + 0.02 * d,
            "coverage": 1.0,
            "coverage_same_version": 0.95 + 0.01 * math.tanh(a),
            "step_seconds": 1.2 + 0.05 * d,
            "replay_rows": 4116,
            "flip_rate": 0.01 + 0.02 * done + 0.001 * b,
            "reward": reward,
            "reward_std": 0.3,
            "uniform_groups": 3,
            "unscored": 0,
            "staleness_mean": (stale[i][1] + 2 * stale[i][2]) / (GROUPS * SIZE),
            "staleness_max": 2,
            "staleness_histogram": stale[i],
            "publish_seconds": 0.26 + 0.01 * c,
            "pause_seconds": 0.25,
            "publish_bytes": 3603200,
            "engines": ENGINES,
            "buffer_held": 64 + i % 3,
            "buffer_capacity": 192,
            "wait_seconds": 0.05 * abs(a),
            "turn_seconds": STEP_S,
            "trained_tokens_per_s": 768.0 + 20 * a,
        }
        lines.append(encode(record))
        time = begin + STEP_S + 0.01
        if step % 5 == 0:
            rate = {"kind": "rollout", "time": time, "sampled_tokens_per_s": 800 + 40 * b, "running_requests": 512}
            lines.append(encode(rate | {"reward_mean": reward, "failed": 0, "version": step}))
        if step % 10 == 0:
            kl = {"kl_replay": 3e-5 * math.exp(0.2 * c), "kl_live": 1e-4 * (1 + 4 * done)}
            lines.append(encode({"kind": "probe", "time": time, "step": step, "version": step, "tokens": 400} | kl))
        if step % 20 == 0 or step == 1:
            accuracy = {"version": step - (step == 1), "accuracy": round(reward, 3), "n": 200, "failed": 0}
            lines.append(encode({"kind": "eval", "time": time} | accuracy))
    return b"\n".join(lines) + b"\n"


def _events(first: int, count: int, per_step: int, rng: np.random.Generator) -> bytes:
    begin = _begins(first, count)
    steps = np.arange(first + 1, first + count + 1)
    # Both trainer ranks step, then rank 0 updates the engines, which pause at the end of it.
    own = [
        ("trainer-0", "step", begin + 0.1, begin + 1.3, "step"),
        ("trainer-1", "step", begin + 0.1, begin + 1.31, "step"),
        ("trainer-0", "pause", begin + 1.5, begin + 1.6, "version"),
        ("trainer-0", "update", begin + 1.32, begin + 1.6, "version"),
    ]
    parts = [
        _lines(
            f'{{"role":"{role}","span":"{span}","start":', start, ',"end":', end, f',"{number}":', steps, "}", by=end
        )
        for role, span, start, end, number in own
    ]
    n = count * max(1, per_step - len(own))
    ends = np.sort(rng.uniform(begin[0], begin[-1] + STEP_S, n))
    sampled = _lines(
        '{"role":"rollout-0","span":"generate","start":',
        ends - rng.uniform(0.5, 3.0, n),
        ',"end":',
        ends,
        ',"requests":256,"engine":"engine-',
        rng.integers(0, ENGINES, n),
        '","tokens":',
        rng.integers(600, 900, n),
        "}",
        by=ends,
    )
    lines = pl.concat([*parts, sampled]).sort("end")["line"]
    return ("\n".join(lines.to_list()) + "\n").encode()


def _lines(*parts: str | np.ndarray, by: np.ndarray) -> pl.DataFrame:
    """Lines put together from texts and columns, and what they are sorted by."""
    columns = {f"c{i}": p for i, p in enumerate(parts) if not isinstance(p, str)}
    pieces = [pl.lit(p) if isinstance(p, str) else pl.col(f"c{i}") for i, p in enumerate(parts)]
    return pl.DataFrame({**columns, "end": by}).select("end", pl.concat_str(pieces).alias("line"))


def _routing(step: int, layers: int, experts: int, rng: np.random.Generator) -> bytes:
    sampler = rng.multinomial(800, rng.dirichlet(np.full(experts, 5.0)), size=layers)
    moved = np.clip(sampler + rng.integers(-9, 10, sampler.shape), 0, None)
    record = {
        "kind": "routing",
        "step": step,
        "version": step,
        "layers": list(range(layers)),
        "flips": (0.01 + 0.02 * rng.random(layers)).tolist(),
        "load_sampler": sampler.tolist(),
        "load_trainer": moved.tolist(),
    }
    return msgspec.json.encode(record) + b"\n"
