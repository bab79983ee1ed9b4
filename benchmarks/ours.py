"""Our side of the end-to-end benchmark: a whole run of the demo's recipe on one of the tasks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs import Measured
from benchmarks.tasks import Task
from moe_asyncrl.cluster.demo import recipe_path
from moe_asyncrl.cluster.run_setup import absolute, create_run_folder, preflight
from moe_asyncrl.cluster.supervisor import Supervisor
from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.jsonl import read_jsonl

SKIPPED_STEPS = 2
"""The first steps start with an empty pipeline; they are run on top of those that are measured."""


@dataclass(frozen=True)
class Ours:
    """One run: what was measured, and what else is worth knowing of it."""

    measured: Measured
    figures: dict[str, Any]


def recipe_changes(task: Task, *, model: Path, prompts: Path, runs: Path, steps: int, seed: int) -> list[str]:
    """What makes the demo's recipe the task's: nothing is evaluated, probed or saved along the way."""
    changes = [
        f"run.name={task.name}",
        f"run.folder={runs}",
        f"run.seed={seed}",
        f"run.steps={steps + SKIPPED_STEPS}",
        f"model.path={model}",
        f"data.train={prompts}",
        "data.shuffle=false",
        "data.eval=null",
        "warmup.steps=0",
        "replay.probe_every=0",
        "checkpoint.every=0",
        "telemetry.tensorboard=false",
        "optimizer.warmup_steps=0",
        f"rollout.groups_per_step={task.groups}",
        f"rollout.group_size={task.group_size}",
        f"rollout.max_new_tokens={task.max_new_tokens}",
        "rollout.ignore_eos=true",
        # As the peer: it samples and trains in float32. It is also the faster of the two on a CPU.
        "engine.dtype=float32",
    ]
    if task.long_tailed:
        changes += ["rollout.max_new_tokens_field=length", "model.max_context=640", "rollout.groups_per_request=4"]
    return changes


def measure(
    task: Task, steps: int, *, model: Path, prompts: Path, runs: Path, seed: int, extra: Sequence[str] = ()
) -> Ours:
    """Run the loop for `steps` steps more than it takes to fill the pipeline. `extra` are further recipe overrides.

    Raises UserError if the run fails or is interrupted.
    """
    changes = recipe_changes(task, model=model, prompts=prompts, runs=runs, steps=steps, seed=seed)
    recipe = absolute(load_recipe(recipe_path("demo"), [*changes, *extra]), Path.cwd())
    preflight(recipe)
    run = create_run_folder(recipe)
    summary = Supervisor(run, recipe).run()
    if summary.status != "ok":
        raise UserError(f"our run of the {task.name} task: {summary.error or summary.status}; see {run.path}")
    lines = [m for m in read_jsonl(run.metrics_path) if m["kind"] == "step"]
    measured, begin, end = steady(lines)
    generated = [e for e in read_jsonl(run.events_path) if e["span"] == "generate" and begin <= e["end"] <= end]
    rest = lines[SKIPPED_STEPS:]
    return Ours(
        measured,
        {
            "sampled_tokens_per_s": sum(e["tokens"] for e in generated) / measured.seconds,
            "trained_tokens_per_s": measured.rate,
            "seconds_per_step": statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(lines)),
            "seconds_in_step": statistics.median(m["step_seconds"] for m in rest),
            "overlap": summary.overlap,
            "staleness_max": summary.staleness_max,
            "replay_coverage": summary.replay_coverage,
        },
    )


def steady(lines: Sequence[Mapping[str, Any]]) -> tuple[Measured, float, float]:
    """The steps after the first `SKIPPED_STEPS`: what they came to, and from when to when (Unix seconds).

    From the end of the last skipped step to the end of the last one: waits for batches and weight updates included.
    Raises ValueError if there are no steps after the skipped ones.
    """
    rest = lines[SKIPPED_STEPS:]
    if not rest:
        raise ValueError(f"{len(lines)} steps are too few: the first {SKIPPED_STEPS} do not count")
    begin, end = float(lines[SKIPPED_STEPS - 1]["time"]), float(rest[-1]["time"])
    return Measured(sum(int(m["tokens"]) for m in rest), len(rest), end - begin), begin, end
