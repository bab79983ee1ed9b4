"""Two programs on a machine that is not calm: measured in turn, a ratio for each pair, the median of those."""

from __future__ import annotations

import math
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


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from the order of the values alone (no assumption on how they are spread).

    The k-th smallest and k-th largest of n, with k the largest for which a median of n fair coins falls outside with
    at most 5 %: P(B(n, 1/2) < k) <= 0.025 (Conover, Practical Nonparametric Statistics, 3.2). Raises ValueError below
    6 values, where no such k is.
    """
    n, ordered = len(values), sorted(values)
    below, k = 0.0, 0
    while (below := below + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    if k == 0:
        raise ValueError(f"an interval of the median takes at least 6 values, there are {n}")
    return ordered[k - 1], ordered[n - k]
