"""Two programs on a machine that is not calm: measured in turn, a ratio for each pair, the median of those."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["ours", "peer"]


@dataclass(frozen=True)
class Measured:
    """What one side trained in one measurement."""

    tokens: int
    """Sampled tokens that the loss was taken over, of `steps` optimizer steps."""
    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Trained tokens a second. Raises ValueError if no time has passed."""
        if self.seconds <= 0:
            raise ValueError(f"{self.steps} steps in {self.seconds} s cannot be: the measurement is broken")
        return self.tokens / self.seconds


def turns(pairs: int) -> list[Side]:
    """Whose turn it is: ours, peer, ours, peer, …"""
    return ["ours", "peer"] * pairs


def pair_ratios(ours: Sequence[Measured], peer: Sequence[Measured]) -> list[float]:
    """Our rate over the peer's, pair by pair.

    Raises ValueError if the sides were not measured equally often, or not over equally many steps.
    """
    if [m.steps for m in ours] != [m.steps for m in peer]:
        raise ValueError(f"not the same work: {[m.steps for m in ours]} steps and {[m.steps for m in peer]}")
    return [a.rate / b.rate for a, b in zip(ours, peer, strict=True)]


def median_ratio(ours: Sequence[Measured], peer: Sequence[Measured]) -> float:
    """The median of `pair_ratios`."""
    return statistics.median(pair_ratios(ours, peer))
