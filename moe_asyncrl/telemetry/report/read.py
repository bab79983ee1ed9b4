"""Everything that a report shows, read once from the run folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from moe_asyncrl.telemetry.frames import frame, sampled_lines
from moe_asyncrl.telemetry.live_state import LiveState, read_state
from moe_asyncrl.telemetry.report.events import Events, read_events
from moe_asyncrl.telemetry.report.logs import Problem, problems
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import Summary
from moe_asyncrl.telemetry.view import read_summary, status_of

STEP_FIELDS = (
    "reward",
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "flip_rate",
    "coverage",
    "coverage_same_version",
    "staleness_mean",
    "kl_reference",
    "clip_fraction",
    "importance_mean",
    "step_seconds",
    "wait_seconds",
    "publish_seconds",
    "turn_seconds",
    "trained_tokens_per_s",
    "sampled_tokens_per_s",
    "accuracy",
    "kl_replay",
    "kl_live",
)
SCHEMA = {
    "kind": pl.String,
    "time": pl.Float64,
    "step": pl.Int64,
    "version": pl.Int64,
    "staleness_max": pl.Int64,
    "buffer_held": pl.Int64,
    "buffer_capacity": pl.Int64,
    "staleness_histogram": pl.List(pl.Int64),
    **dict.fromkeys(STEP_FIELDS, pl.Float64),
}
PROBES = 400
"""Most records of `routing.jsonl` that are read."""
STRETCH_STEPS = 12
"""Steps of the timeline that shows single spans."""
STRETCH_S = 3600.0
"""Longest such stretch, in seconds."""


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it. Frames have a row a record, oldest first; a step done twice has one."""

    name: str
    status: str
    """As `View.status`."""
    error: str | None
    now: float
    """When it was read, Unix seconds."""
    recipe: dict[str, Any]
    """Empty if it cannot be read."""
    summary: Summary | None
    state: LiveState | None
    steps: pl.DataFrame
    warmup: pl.DataFrame
    rollouts: pl.DataFrame
    evals: pl.DataFrame
    probes: pl.DataFrame
    routing: tuple[dict[str, Any], ...]
    """Records of `routing.jsonl`, oldest first; of a long run, some of them."""
    events: Events
    stretch: tuple[float, float] | None
    """From and to of the last steps, Unix seconds."""
    problems: tuple[Problem, ...]

    @property
    def began(self) -> float | None:
        """Unix time of the first event or record."""
        times = [self.events.first, *(_first(f) for f in (self.steps, self.warmup, self.rollouts))]
        return min((t for t in times if t is not None), default=None)


def read_run(folder: RunFolder) -> RunData:
    """Read a run folder. What is not there is empty; nothing is raised for it."""
    now = time.time()
    metrics = frame(folder.metrics_path, SCHEMA)
    kinds = {kind: metrics.filter(pl.col("kind") == kind) for kind in ("step", "warmup", "rollout", "eval", "probe")}
    steps = _once(kinds["step"])
    stretch = _stretch(steps)
    summary, state = read_summary(folder), read_state(folder)
    newest = {kind: {"time": now} for kind, rows in kinds.items() if rows.height}
    status, error = status_of(state, summary, newest, now)
    return RunData(
        name=folder.path.name,
        status=status,
        error=error,
        now=now,
        recipe=_recipe(folder),
        summary=summary,
        state=state,
        steps=steps,
        warmup=_once(kinds["warmup"]),
        rollouts=kinds["rollout"].filter(pl.col("time").is_not_null()),
        evals=kinds["eval"].filter(pl.col("version").is_not_null()).unique("version", keep="last").sort("version"),
        probes=_once(kinds["probe"]),
        routing=_routing(sampled_lines(folder.routing_path, PROBES)),
        events=read_events(folder.events_path, stretch),
        stretch=stretch,
        problems=tuple(problems(folder.logs)),
    )


def _once(rows: pl.DataFrame) -> pl.DataFrame:
    """One row for each step, the last one written: after a resume, steps are done again."""
    return rows.filter(pl.col("step").is_not_null()).unique("step", keep="last", maintain_order=True).sort("step")


def _stretch(steps: pl.DataFrame) -> tuple[float, float] | None:
    last = steps.filter(pl.col("time").is_not_null()).tail(STRETCH_STEPS)
    if not last.height:
        return None
    end, first = float(last["time"][-1]), last.row(0, named=True)
    start = float(first["time"]) - float(first["turn_seconds"] or first["step_seconds"] or 0.0)
    return max(start, end - STRETCH_S), end


def _first(rows: pl.DataFrame) -> float | None:
    least = rows["time"].min()
    return float(least) if isinstance(least, int | float) else None


def _recipe(folder: RunFolder) -> dict[str, Any]:
    try:
        found = msgspec.yaml.decode(folder.recipe.read_bytes())
    except (OSError, ImportError, msgspec.MsgspecError):
        return {}
    return found if isinstance(found, dict) else {}


def _routing(records: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Those that hold what a routing record must; one for each step."""
    found: dict[int, dict[str, Any]] = {}
    for r in records:
        if isinstance(r.get("step"), int) and all(
            isinstance(r.get(k), list) for k in ("layers", "flips", "load_sampler", "load_trainer")
        ):
            found[r["step"]] = r
    return tuple(found[step] for step in sorted(found))
