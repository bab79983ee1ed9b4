"""Whether a gap that is measured again and again grows: the slope of a line through it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Slope:
    """Of y over x by least squares."""

    slope: float
    error: float
    """Standard error of the slope."""

    @property
    def score(self) -> float:
        """Standard errors that the slope is from 0."""
        return self.slope / self.error if self.error > 0 else math.inf * (self.slope > 0)


def slope_of(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares with an intercept; the error is the robust one for residuals of uneven spread (HC3).

    J. S. Long, L. H. Ervin, "Using Heteroscedasticity Consistent Standard Errors in the Linear Regression Model", 2000.
    At least four points.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 4:
        raise ValueError(f"{len(a)} points: at least 4")
    design = np.stack([np.ones_like(a), a - a.mean()], 1)
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ b
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    residual = (b - design @ beta) / (1 - leverage)
    covariance = inverse @ (design.T * residual**2) @ design @ inverse
    return Slope(float(beta[1]), math.sqrt(float(covariance[1, 1])))
