"""The run folder: where every part writes, and what a person finds afterwards."""

from __future__ import annotations

import os
import secrets
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from moe_asyncrl.telemetry.jsonl import JsonlWriter


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a small file so that a reader sees the old bytes or the new ones, never a part.

    Without `durable` a crash of the machine may leave the file empty: for what is only looked at.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the pid: two nodes of one run can have the same one, and so can two containers.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.write(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Have a file or a folder on the disk before going on."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RunFolder:
    """Names of the files in one run's folder. Holds no state but the open writers."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()

    @property
    def recipe(self) -> Path:
        """The resolved recipe (JSON is YAML too), as the roles read it."""
        return self.path / "recipe.yaml"

    @property
    def metrics_path(self) -> Path:
        """JSON lines with `kind`: step, rollout, eval, probe, warmup."""
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """JSON lines: role, span, start, end (Unix seconds)."""
        return self.path / "events.jsonl"

    @cached_property
    def metrics(self) -> JsonlWriter:
        """Writer of `metrics.jsonl`."""
        return JsonlWriter(self.metrics_path)

    @cached_property
    def events(self) -> JsonlWriter:
        """Writer of `events.jsonl`."""
        return JsonlWriter(self.events_path)

    @property
    def routing_path(self) -> Path:
        """JSON lines, one a probe: flips and expert loads of each MoE layer, sampler's and trainer's."""
        return self.path / "routing.jsonl"

    @cached_property
    def routing(self) -> JsonlWriter:
        """Writer of `routing.jsonl`."""
        return JsonlWriter(self.routing_path)

    @property
    def trajectories(self) -> Path:
        """Some of the trained groups, whole, as `data/recorded.py` reads them."""
        return self.path / "trajectories"

    @property
    def logs(self) -> Path:
        """One log for each role."""
        return self.path / "logs"

    def log_path(self, role: str) -> Path:
        """Log of one role, for example `trainer-0`."""
        return self.logs / f"{role}.log"

    @property
    def endpoints(self) -> Path:
        """Addresses that roles publish for each other."""
        return self.path / "endpoints"

    @property
    def keys(self) -> Path:
        """CURVE keys of the run; readable by its owner only."""
        return self.path / "keys"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        """The weights that reinforcement learning started from, kept if the KL is measured against them."""
        return self.path / "reference"

    @property
    def control_json(self) -> Path:
        """Epoch, version and phase, as last known."""
        return self.path / "control.json"

    @property
    def supervisor_json(self) -> Path:
        """Who supervises the run, and how its roles are."""
        return self.path / "supervisor.json"

    @property
    def slurm_json(self) -> Path:
        """The Slurm job of the run, if it was launched there."""
        return self.path / "slurm.json"

    @property
    def state_json(self) -> Path:
        """The run's state with its engines, for those who look on; at most a second old while the run goes on."""
        return self.path / "state.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def prometheus_targets(self) -> Path:
        """One file for each role, as Prometheus' `file_sd_configs` reads them."""
        return self.endpoints / "prometheus"

    @property
    def summary(self) -> Path:
        """What the run came to; written at its end, also when it fails."""
        return self.path / "summary.json"

    def write_json(self, path: Path, value: Any) -> None:
        """Write a small JSON file atomically."""
        write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=2))
