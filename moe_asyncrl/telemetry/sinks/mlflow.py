"""Figures to an MLflow tracking store. It can only append."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.telemetry.sinks.feed import Position
from moe_asyncrl.telemetry.sinks.points import Point

BATCH = 1000
"""Figures that MLflow takes at once."""


class MlflowSink:
    """One MLflow run for a run folder, gone on with after a resume."""

    name = "mlflow"

    def __init__(self, uri: str, experiment: str, run_name: str) -> None:
        self._uri, self._experiment, self._run_name = uri, experiment, run_name
        self._client: Any = None
        self._run_id = ""
        self._waiting: list[Any] = []

    def open(self, position: Position, *, fresh: bool) -> str:
        """Start a run, or go on with the one of that id."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        self._run_id = position.identity
        if not self._run_id:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
            self._run_id = self._client.create_run(experiment, run_name=self._run_name).info.run_id
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        return self._run_id

    def rewind(self, group: str, step: int) -> bool:
        """Not here."""
        return False

    def write(self, point: Point) -> None:
        """Keep a point's scalars until the next flush; MLflow has no histograms."""
        from mlflow.entities import Metric

        at = int(point.time * 1000)
        self._waiting += [Metric(tag, value, at, point.step) for tag, value in point.scalars.items()]
        if len(self._waiting) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:BATCH])
            del self._waiting[:BATCH]

    def close(self) -> None:
        """Say that the run is over."""
        if self._client is not None:
            self._client.set_terminated(self._run_id)
