"""Run folders as a run would have written them, for those who look on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import Data, Model, Recipe, Run
from moe_asyncrl.telemetry.live_state import EngineLook, LiveState
from moe_asyncrl.telemetry.run_folder import RunFolder

NOW = 1_800_000_000.0


def step(n: int, **fields: Any) -> dict[str, Any]:
    """The record of step `n`, one a second; every figure differs from step to step."""
    return {
        "kind": "step",
        "time": NOW - 1000 + n,
        "step": n,
        "version": n,
        "reward": n / 1000,
        "loss": -n / 7,
        "entropy": 1.5,
        "tokens": 100 + n,
        "sequences": 16,
        "trained_tokens_per_s": 2000.0 + n,
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "staleness_histogram": [n, 0, 3],
        "coverage": 1.0,
        "flip_rate": 0.01,
        "buffer_held": 64,
        "buffer_capacity": 192,
        "publish_seconds": 0.25,
        "pause_seconds": 0.125,
        **fields,
    }


def engine(index: int, **fields: Any) -> EngineLook:
    """An engine that is well."""
    return EngineLook(
        **{
            "name": f"engine-{index}",
            "url": f"http://127.0.0.1:{30000 + index}",
            "incarnation": 0,
            "state": "serving",
            "version": 41,
            "heartbeat": NOW - 1,
            **fields,
        }
    )


def state(**fields: Any) -> LiveState:
    """The state of a run that goes on."""
    defaults = {"time": NOW, "phase": "running", "version": 41, "step": 41, "held": 96, "capacity": 192, "issued": 5}
    return LiveState(**{**defaults, **fields})


def make_run(path: Path, records: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> RunFolder:
    """A run folder with a recipe of 120 steps."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(model=Model(path="model"), data=Data(train="train.jsonl"), run=Run(steps=120))
    folder.recipe.write_text(dump_recipe(recipe))
    for record in records:
        folder.metrics.append(record)
    for event in events or []:
        folder.events.append(event)
    return folder
