"""Figures to W&B, online or offline as its own settings (`WANDB_MODE`) say. It can only append."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from moe_asyncrl.telemetry.sinks.feed import Position
from moe_asyncrl.telemetry.sinks.points import AXES, Point


class WandbSink:
    """One W&B run for a run folder, gone on with after a resume."""

    name = "wandb"

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        self._folder, self._project, self._config = folder, project, config
        self._run: Any = None

    def open(self, position: Position, *, fresh: bool) -> str:
        """Start it, or go on with the one of that id."""
        import wandb

        identity = position.identity or secrets.token_hex(8)
        self._run = wandb.init(
            project=self._project,
            name=self._folder.name,
            id=identity,
            resume="allow",
            dir=str(self._folder),
            config=self._config,
            # Standard output belongs to the console, and the machine's figures are not the run's.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )
        for group in {group for group, _ in AXES.values()} | {"rollout"}:
            axis = axis_of(group)
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{group}/*", step_metric=axis)
        return identity

    def rewind(self, group: str, step: int) -> bool:
        """Not here."""
        return False

    def write(self, point: Point) -> None:
        """All figures of a point."""
        import wandb

        row: dict[str, Any] = {**point.scalars, axis_of(point.group): point.step}
        for tag, counts in point.histograms.items():
            edges = [k - 0.5 for k in range(len(counts) + 1)]
            row[tag] = wandb.Histogram(np_histogram=(list(counts), edges))
        self._run.log(row)

    def flush(self) -> None:
        """W&B brings them on its own."""

    def close(self) -> None:
        """Wait until W&B has them, and end its helper process."""
        if self._run is not None:
            import wandb

            self._run.finish()
            self._run = None
            wandb.teardown()


def axis_of(group: str) -> str:
    """The figure that W&B draws a group's figures over."""
    return "warmup_step" if group == "warmup" else "policy_step"
