"""When something was busy: a union of many intervals that stays small while it grows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]

PENDING = 200_000
"""Intervals that are kept before they are merged into those seen so far."""


def merged(starts: Times, ends: Times) -> tuple[Times, Times]:
    """Disjoint, sorted intervals that cover the same points. Those without length, or without a time, are left out."""
    there = ends > starts
    starts, ends = starts[there], ends[there]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


class Busy:
    """The points in time that any of the added intervals covers."""

    def __init__(self) -> None:
        self._starts: list[Times] = []
        self._ends: list[Times] = []
        self._pending = 0

    @classmethod
    def of(cls, intervals: Iterable[tuple[float, float]]) -> Busy:
        """From pairs of start and end."""
        pairs = np.array(list(intervals), dtype=np.float64).reshape(-1, 2)
        busy = cls()
        busy.add(pairs[:, 0], pairs[:, 1])
        return busy

    def add(self, starts: Times, ends: Times) -> None:
        """Cover more: [starts[i], ends[i]), float64, in any order."""
        starts, ends = merged(starts, ends)
        self._starts.append(starts)
        self._ends.append(ends)
        self._pending += len(starts)
        if self._pending > PENDING:
            self._merge()

    def intervals(self) -> tuple[Times, Times]:
        """Starts and ends, disjoint and sorted."""
        self._merge()
        return (self._starts[0], self._ends[0]) if self._starts else (np.empty(0), np.empty(0))

    def seconds(self) -> float:
        """Length of all that is covered."""
        starts, ends = self.intervals()
        return float((ends - starts).sum())

    def until(self, times: Times) -> Times:
        """Covered seconds before each of `times`, which must rise."""
        starts, ends = self.intervals()
        if not len(starts):
            return np.zeros(len(times))
        # Covered time grows by the length of an interval inside it and stands still between two.
        points = np.stack([starts, ends], axis=1).ravel()
        grown = np.stack([np.zeros(len(starts)), ends - starts], axis=1).ravel().cumsum()
        return np.interp(times, points, grown)

    def shared(self, other: Busy) -> float:
        """Seconds that both cover."""
        starts, ends = other.intervals()
        return float((self.until(ends) - self.until(starts)).sum())

    def _merge(self) -> None:
        if len(self._starts) > 1:
            starts, ends = merged(np.concatenate(self._starts), np.concatenate(self._ends))
            self._starts, self._ends = [starts], [ends]
        self._pending = 0
