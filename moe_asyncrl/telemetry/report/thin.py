"""Fewer points for a line that looks the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

POINTS = 1200
"""Points of a line at most: more than a chart has pixels for."""


def thinned(y: npt.NDArray[np.float64], most: int = POINTS) -> npt.NDArray[np.int64]:
    """Indices to keep, rising: all if there are at most `most`, else the least and greatest of each of most / 2 parts.

    So every peak of the line stays, and each point that is kept was measured. `y` holds no NaN.
    """
    n = len(y)
    if n <= most:
        return np.arange(n)
    edges = np.linspace(0, n, most // 2 + 1).astype(np.int64)
    kept = [0, n - 1]
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept += [a + int(y[a:b].argmin()), a + int(y[a:b].argmax())]
    return np.unique(np.array(kept))


def running_mean(y: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Mean of the `width` values up to each; of fewer at the start. NaN does not count; NaN where nothing is."""
    there = ~np.isnan(y)
    sums = np.concatenate([[0.0], np.where(there, y, 0.0).cumsum()])
    counts = np.concatenate([[0], there.cumsum()])
    at = np.arange(1, len(y) + 1)
    before = np.maximum(at - width, 0)
    n = counts[at] - counts[before]
    return np.where(n > 0, (sums[at] - sums[before]) / np.maximum(n, 1), np.nan)
