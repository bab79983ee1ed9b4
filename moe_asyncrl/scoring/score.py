"""What a scorer is asked and what it says."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from moe_asyncrl.data.trajectory import ScorerReport, ScoreStatus

TOTAL = "total"
ENTRY = "entry"
"""Key under which a job's metadata has the item of a task, for the task's own scorer."""


class ScoreJob(msgspec.Struct, frozen=True, array_like=True):
    """One completion to score."""

    prompt: str
    completion: str
    answer: str | None
    metadata: dict[str, Any]
    function: str | None = None
    """The reward that scores it; the recipe's if not given."""


class Score(msgspec.Struct, frozen=True, array_like=True):
    """The verdict on one completion.

    `rewards` is empty unless the status is `ok`; then it has `total`, what training uses.
    """

    status: ScoreStatus
    rewards: dict[str, float] = {}
    detail: str = ""

    def report(self, scorer_version: str) -> ScorerReport:
        """As a trajectory carries it."""
        value = self.rewards[TOTAL] if self.status == "ok" else None
        return ScorerReport(status=self.status, value=value, scorer_version=scorer_version, detail=self.detail)


def score_from(value: object) -> Score:
    """The score for what a reward function returned: a finite number, or names with finite numbers.

    With names, `total` is the reward if it is among them, else their sum. Anything else is a failure that says what
    came back.
    """
    if isinstance(value, dict):
        if not value:
            return failed("the reward function returned an empty dict")
        rewards: dict[str, float] = {}
        for name, part in value.items():
            number = _finite(part)
            if number is None or not isinstance(name, str):
                return failed(f"the reward function returned {_show(part)} for {name!r}, expected a finite number")
            rewards[name] = number
        rewards.setdefault(TOTAL, math.fsum(rewards.values()))
        return Score("ok", rewards)
    number = _finite(value)
    if number is None:
        return failed(f"the reward function returned {_show(value)}, expected a finite number")
    return Score("ok", {TOTAL: number})


def failed(detail: str) -> Score:
    """A score that could not be had."""
    return Score("failed", {}, detail[:500])


def _finite(value: object) -> float | None:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None
    return number if math.isfinite(number) else None


def _show(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
