"""Which routing rows were made by other weights than the token that they predict. Pure.

Row i is of the pass that reads token i and predicts token i + 1. Where the policy sampled that token, the row is its
own if the weights that routed it sampled the token. A row of the prompt is compared with the first token sampled behind
it, as those weights are the ones that should have read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.trajectory import RoutingRun


def row_versions(runs: Sequence[RoutingRun], rows: int) -> npt.NDArray[np.int64]:
    """int64 [rows]: the weights that routed each row; -1 where not known."""
    version = np.full(rows, -1, dtype=np.int64)
    for run in runs:
        version[run.start : run.end] = run.version
    return version


def wanted_versions(loss_mask: npt.NDArray[np.bool_], weight_version: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """int64 [T-1]: the weights that each row should be of.

    That is the version of the next sampled token; of the last one, behind it; -1 where nothing was sampled.
    """
    n = len(loss_mask)
    at = np.where(loss_mask, np.arange(n), n)
    following = np.minimum.accumulate(at[::-1])[::-1]
    sampled = np.flatnonzero(loss_mask)
    if sampled.size == 0:
        return np.full(n - 1, -1, dtype=np.int64)
    following = np.where(following == n, sampled[-1], following)
    return weight_version[following].astype(np.int64)[1:]


def other_version(
    runs: Sequence[RoutingRun], loss_mask: npt.NDArray[np.bool_], weight_version: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """bool [T-1]: rows that are there, and of other weights than they should be, or of weights that are not known."""
    rows = len(loss_mask) - 1
    known = np.zeros(rows, dtype=np.bool_)
    for run in runs:
        known[run.start : run.end] = run.source != "missing"
    return known & (row_versions(runs, rows) != wanted_versions(loss_mask, weight_version))
