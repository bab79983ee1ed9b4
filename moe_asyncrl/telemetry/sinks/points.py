"""From lines of `metrics.jsonl` to points of charts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Group = Literal["train", "warmup", "eval", "probe"]
"""What a point belongs to. `warmup` counts its own steps; the others count the steps of the run."""

AXES: dict[str, tuple[Group, str]] = {
    "step": ("train", "step"),
    "warmup": ("warmup", "step"),
    "eval": ("eval", "version"),
    "probe": ("probe", "step"),
}
"""Kind of record -> its group, and the field that says where on the axis it stands."""
NOT_FIGURES = frozenset({"kind", "time", "step", "version", "of", "n", "newest_version"})


@dataclass(frozen=True)
class Point:
    """Figures at one place of the axis."""

    group: Group
    step: int
    time: float
    """Unix seconds."""
    scalars: dict[str, float]
    """By `group/name`; only finite ones."""
    histograms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By `group/name`: how many had the value 0, 1, 2 …"""


class Points:
    """Makes points of records. A rollout's report has no step of its own: the newest one is joined to each step."""

    def __init__(self) -> None:
        self._rollout: dict[str, float] = {}

    def of(self, record: dict[str, Any]) -> Point | None:
        """The point of a record; None for a rollout's report, and for a record that makes no sense."""
        kind = record.get("kind")
        if kind == "rollout":
            self._rollout = scalars_of(record, "rollout")
            return None
        axis = AXES.get(kind) if isinstance(kind, str) else None
        if axis is None:
            return None
        group, name = axis
        step, time = record.get(name), record.get("time")
        if type(step) is not int or step < 0 or not isinstance(time, int | float):
            return None
        scalars = scalars_of(record, group)
        if group == "train":
            scalars |= self._rollout
        return Point(group, step, float(time), scalars, histograms_of(record, group))


def scalars_of(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """The finite numbers of a record by `prefix/name`."""
    return {
        f"{prefix}/{name}": float(value)
        for name, value in record.items()
        if name not in NOT_FIGURES and type(value) in (int, float) and math.isfinite(value)
    }


def histograms_of(record: dict[str, Any], prefix: str) -> dict[str, tuple[float, ...]]:
    """The counts of a record (`NAME_histogram`: a list) by `prefix/NAME`."""
    found = {}
    for name, value in record.items():
        if name.endswith("_histogram") and isinstance(value, list) and value and all(map(is_count, value)):
            found[f"{prefix}/{name.removesuffix('_histogram')}"] = tuple(float(n) for n in value)
    return found


def is_count(n: object) -> bool:
    """A finite number of at least 0."""
    return isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) and n >= 0
