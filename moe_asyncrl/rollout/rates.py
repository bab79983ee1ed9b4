"""The sampler's account: totals of the run, and rates since the last report."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from moe_asyncrl.scoring.score import TOTAL, Score


class Rates:
    """Counts of one worker. Tokens are sampled ones; a sample that failed still was sampled."""

    def __init__(self) -> None:
        self.running = 0
        """Requests that an engine has now."""
        self.completions = self.failed = self.groups_held = self.groups_failed = self.groups_filtered = 0
        self._since = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._tokens = self._recent = 0
        self._rewards, self._scored = 0.0, 0

    def sampled(self, lengths: Iterable[int]) -> None:
        """Completions of these lengths came back."""
        for n in lengths:
            self._tokens += n
            self._recent += 1
            self.completions += 1

    def scored(self, scores: Iterable[Score]) -> None:
        """Only real scores enter the mean."""
        for score in scores:
            if score.status == "ok":
                self._rewards += score.rewards[TOTAL]
                self._scored += 1

    def report(self) -> dict[str, Any]:
        """Fields of a `rollout` line; the rates start anew."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        line = {
            "kind": "rollout",
            "time": time.time(),
            "sampled_tokens_per_s": self._tokens / seconds,
            "completions_per_s": self._recent / seconds,
            "reward_mean": self._rewards / self._scored if self._scored else None,
            "running_requests": self.running,
            "completions": self.completions,
            "failed": self.failed,
            "groups_held": self.groups_held,
            "groups_failed": self.groups_failed,
            "groups_filtered": self.groups_filtered,
        }
        self._since = now
        self._clear()
        return line
