"""The gap between two sets of log-probabilities of the same tokens, and how much of it each control takes away.

Pure functions on arrays over N tokens. A control is one more evaluation of the same tokens in which one thing was made
the same on both sides; its drop is the mean k3 before less the mean k3 after. Drops of several controls need not add up
to the gap: two causes can hide each other, and one can stand in for another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LEAST_SHARE = 0.1
"""A cause is named if it takes away at least this part of the gap, and clearly more than noise."""
CLEAR = 2.0
"""Standard errors that a drop must be above."""


@dataclass(frozen=True)
class Gap:
    """How far the trainer is from the sampler over `tokens` tokens."""

    tokens: int
    kl: float
    """Mean k3 (the estimator of KL(sampler || trainer)), nats a token."""
    kl_error: float
    """Standard error of that mean, trajectories taken as independent; NaN for fewer than two."""
    mean_abs: float
    """Mean |trainer - sampler| log-probability."""
    max_abs: float


@dataclass(frozen=True)
class Control:
    """One more evaluation. Where `applies` is False the control was not possible and the first evaluation stands."""

    cause: str
    how: str
    trainer: Floats
    """[N]"""
    sampler: Floats
    """[N]"""
    applies: Bools | None = None
    """[N]; None for everywhere."""


@dataclass(frozen=True)
class Finding:
    """What one control came to."""

    cause: str
    how: str
    gap: Gap
    """With the control."""
    drop: float
    """Mean k3 before less after."""
    drop_error: float
    """Its standard error, trajectories taken as independent; NaN for fewer than two."""
    drop_abs: float
    """Mean |difference| before less after."""
    share: float
    """`drop` over the gap."""
    tokens: int
    """Tokens where the control was possible."""

    @property
    def named(self) -> bool:
        """Whether this explains a part of the gap worth naming: a share, and no noise."""
        noise = 0.0 if math.isnan(self.drop_error) else CLEAR * self.drop_error
        return self.share >= LEAST_SHARE and self.drop > noise


def k3(sampler: Floats, trainer: Floats) -> Floats:
    """`expm1(d) - d` with d = trainer - sampler, token by token: as `algorithms.kl.k3`, in numpy."""
    d = trainer - sampler
    with np.errstate(over="ignore"):
        return np.asarray(np.expm1(d) - d)


def gap_of(sampler: Floats, trainer: Floats, owner: npt.NDArray[np.int64]) -> Gap:
    """The gap over all N tokens; `owner` [N] says which tokens are of one trajectory. N at least 1."""
    each, d = k3(sampler, trainer), np.abs(trainer - sampler)
    return Gap(len(each), float(each.mean()), clustered_error(each, owner), float(d.mean()), float(d.max()))


def finding_of(sampler: Floats, trainer: Floats, control: Control, owner: npt.NDArray[np.int64]) -> Finding:
    """What `control` takes from the gap of the first evaluation."""
    on = np.ones(len(sampler), dtype=bool) if control.applies is None else control.applies
    s, t = np.where(on, control.sampler, sampler), np.where(on, control.trainer, trainer)
    before, after = k3(sampler, trainer), k3(s, t)
    saved = before - after
    drop, whole = float(saved.mean()), float(before.mean())
    return Finding(
        cause=control.cause,
        how=control.how,
        gap=gap_of(s, t, owner),
        drop=drop,
        drop_error=clustered_error(saved, owner),
        drop_abs=float((np.abs(trainer - sampler) - np.abs(t - s)).mean()),
        share=drop / whole if whole > 0 else 0.0,
        tokens=int(on.sum()),
    )


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The best control of each cause, the largest drop first."""
    best: dict[str, Finding] = {}
    for f in findings:
        if f.cause not in best or f.drop > best[f.cause].drop:
            best[f.cause] = f
    return sorted(best.values(), key=lambda f: -f.drop)


def clustered_error(values: Floats, owner: npt.NDArray[np.int64]) -> float:
    """Standard error of the mean of [N] values whose clusters are independent, tokens within one not.

    The cluster-robust estimator of a mean (Cameron & Miller, "A Practitioner's Guide to Cluster-Robust Inference",
    2015), with the factor C / (C - 1); NaN for fewer than two clusters.
    """
    numbers, inverse = np.unique(owner, return_inverse=True)
    c = len(numbers)
    if c < 2:
        return float("nan")
    sums = np.bincount(inverse, weights=values - values.mean(), minlength=c)
    return math.sqrt(float((sums**2).sum()) * c / (c - 1)) / len(values)
