"""What a chart is: plain values in the form that plotly.js draws. Colours are names, which the page fills in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from moe_asyncrl.telemetry.report.thin import running_mean, thinned

Trace = dict[str, Any]
Values = npt.NDArray[np.float64]

MARKED = 60
"""Lines with at most so many points show each of them."""
TREND_FROM = 60
"""A line of at least so many points may have its running mean drawn over it."""


@dataclass(frozen=True)
class Chart:
    """One picture with a title and one or two sentences; the sentence `missing` stands in its place without data."""

    id: str
    title: str
    text: str
    traces: tuple[Trace, ...] = ()
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    height: int = 300
    """In pixels."""
    missing: str = ""


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    title: str
    text: str
    charts: tuple[Chart, ...]


def column(rows: pl.DataFrame, name: str) -> Values:
    """A column as float64, NaN where there is nothing."""
    return rows[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()


def line(name: str, x: Values, y: Values, colour: str, *, trend: bool = False, form: str = ".4~g") -> list[Trace]:
    """A line, thinned out; with `trend`, faint under its own running mean. Empty if nothing is known."""
    known = ~np.isnan(y)
    if not known.any():
        return []
    x, y = x[known], y[known]
    if trend and len(y) >= TREND_FROM:
        width = max(5, len(y) // 40)
        mean = running_mean(y, width)
        return [
            _trace(name, x, y, colour, form, opacity=0.35, width=1.0),
            _trace(f"mean of {width} steps", x, mean, colour, form, width=2.5),
        ]
    return [_trace(name, x, y, colour, form)]


def _trace(
    name: str, x: Values, y: Values, colour: str, form: str, *, opacity: float = 1.0, width: float = 2.0
) -> Trace:
    kept = thinned(y)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= MARKED else "lines",
        "name": name,
        "x": numbers(x[kept]),
        "y": numbers(y[kept]),
        "opacity": opacity,
        "line": {"color": f"${colour}", "width": width},
        "marker": {"color": f"${colour}", "size": 6},
        "hovertemplate": f"%{{x}}: %{{y:{form}}}<extra>{name}</extra>",
    }


def numbers(values: Values) -> list[float | int | None]:
    """Values for JSON: whole ones as integers, NaN as null."""
    return [None if v != v else int(v) if v.is_integer() and abs(v) < 2**53 else v for v in values.tolist()]


def axes(
    x: str,
    y: str,
    *,
    log: Sequence[Trace] | None = None,
    zero: bool = False,
    form: str | None = None,
    integer_x: bool = True,
) -> dict[str, Any]:
    """Layout of a chart with two axes. `zero`: the y axis begins at 0. `log`: the lines of a logarithmic y axis."""
    vertical: dict[str, Any] = {"title": {"text": y}, "rangemode": "tozero" if zero else "normal"}
    if log is not None:
        ticks = log_ticks([v for t in log for v in t["y"] if v])
        vertical |= {"type": "log", "tickvals": ticks, "ticktext": [f"{v:.0e}" for v in ticks]}
    if form:
        vertical["tickformat"] = form
    return {"xaxis": {"title": {"text": x}, **({"tickformat": ",d"} if integer_x else {})}, "yaxis": vertical}


def log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times the powers of ten around the values; powers alone over more than three of them."""
    if not values or min(values) <= 0:
        return []
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [float(f"{m}e{e}") for e in range(low, high + 1) for m in ((1, 2, 5) if high - low <= 3 else (1,))]


def heatmap(
    x: Sequence[Any], y: Sequence[str], z: Sequence[Sequence[float | None]], *, hover: str, **more: Any
) -> Trace:
    """Cells by row (`y`) and column (`x`)."""
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in z],
        "hovertemplate": hover + "<extra></extra>",
        "hoverongaps": False,
        "colorbar": {"thickness": 12, "outlinewidth": 0},
        **more,
    }


def time_unit(seconds: float) -> tuple[str, float]:
    """Name of the unit of a time axis, and its seconds."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
