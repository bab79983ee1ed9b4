"""Charts of time: rates, where a step's time goes, and who was busy when."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_asyncrl.telemetry.busy import merged
from moe_asyncrl.telemetry.report.chart import Chart, Section, Trace, axes, column, heatmap, line, numbers, time_unit
from moe_asyncrl.telemetry.report.events import Lane
from moe_asyncrl.telemetry.report.read import RunData
from moe_asyncrl.telemetry.view import natural

LANES = 16
"""Rows of a timeline at most."""
BINS = 200
BARS = 1500
"""Bars of one row at most; the newest ones are shown."""
KINDS = {
    "generate": ("samples", "green"),
    "step": ("trains", "blue"),
    "warmup_step": ("warms up", "teal"),
    "update": ("updates weights", "orange"),
    "pause": ("pauses engines", "red"),
    "probe": ("measures KL", "purple"),
    "eval": ("evaluates", "pink"),
    "checkpoint": ("saves", "grey"),
    "checkpoint_write": ("writes the save to disk", "teal"),
    "checkpoint_seal": ("completes the save", "grey"),
    "engine_start": ("starts", "grey"),
}
"""Span -> what the role does, and its colour; in the order of the rows."""


def speed(run: RunData) -> Section:
    """Rates, a step's time, and both timelines."""
    began = run.began or 0.0
    end = max((t for t in (run.events.last, _last(run)) if t is not None), default=began)
    unit, scale = time_unit(end - began)
    trained = line(
        "trained",
        (column(run.steps, "time") - began) / scale,
        column(run.steps, "trained_tokens_per_s"),
        "blue",
        form=",.0f",
    )
    sampled = line(
        "sampled",
        (column(run.rollouts, "time") - began) / scale,
        column(run.rollouts, "sampled_tokens_per_s"),
        "green",
        form=",.0f",
    )
    x = column(run.steps, "step")
    turn = [
        *line("inside the step", x, column(run.steps, "step_seconds"), "blue", form=".3~f"),
        *line("waits for a batch", x, column(run.steps, "wait_seconds"), "red", form=".3~f"),
        *line("updates the engines", x, column(run.steps, "publish_seconds"), "orange", form=".3~f"),
    ]
    lanes, left_out = lanes_of(run)
    note = f" {left_out} more rows are left out." if left_out else ""
    rows = max(2, len(lanes))
    recent = [lane for lane in lanes if lane in run.events.stretch]
    stretch_axes = _lane_axes("seconds since the start", recent)
    if run.stretch is not None:
        stretch_axes["xaxis"]["range"] = [run.stretch[0] - began, run.stretch[1] - began]
    return Section(
        "Speed, and who was busy when",
        "",
        (
            Chart(
                "rates",
                "Tokens a second",
                "Sampled by all engines, and trained. Over a long time both are equal but for what was dropped.",
                (*trained, *sampled),
                axes(f"{unit} since the start", "tokens a second", zero=True, form="~s", integer_x=False),
                missing="No step and no rollout was recorded.",
            ),
            Chart(
                "turn",
                "Where the trainer's time goes",
                "Seconds of each step. Long waits: sampling is too slow. Long updates: weights travel too slowly.",
                tuple(turn),
                axes("step", "seconds", zero=True),
                missing="No step was recorded.",
            ),
            Chart(
                "timeline",
                "Timeline of the last steps",
                "Each bar is a time in which that row was busy. Where sampling stands above training, the two overlap. "
                "Requests stay open while the engines are paused for new weights." + note,
                tuple(stretch_bars(run, recent, began)),
                stretch_axes,
                wide=True,
                height=110 + 30 * max(2, len(recent)),
                missing="No event stands in the time of the last steps.",
            ),
            Chart(
                "busy",
                "The whole run",
                "Part of the time in which a row was busy: the stronger the colour, the more of it." + note,
                tuple(busy_cells(run, lanes, began, end, scale)),
                _lane_axes(f"{unit} since the start", lanes),
                wide=True,
                height=130 + 26 * rows,
                missing="No event was recorded.",
            ),
        ),
    )


def lanes_of(run: RunData) -> tuple[list[Lane], int]:
    """The rows of a timeline from top to bottom, and how many are left out: of the trainer, only the first rank."""
    order = {span: i for i, span in enumerate(KINDS)}
    all_lanes = [lane for lane in run.events.lanes if not lane.who.startswith("trainer-") or lane.who == "trainer-0"]
    kinds = sorted({lane.span for lane in all_lanes}, key=lambda s: (order.get(s, len(order)), s))
    by_kind = {s: sorted((ln for ln in all_lanes if ln.span == s), key=lambda ln: natural(ln.who)) for s in kinds}
    # Every kind of row has one before any has a second: many engines must not push the trainer out.
    ranked = sorted(
        ((place, i, lane) for i, s in enumerate(kinds) for place, lane in enumerate(by_kind[s])),
        key=lambda entry: (entry[0], entry[1]),
    )[:LANES]
    shown = [lane for _, _, lane in sorted(ranked, key=lambda entry: (entry[1], entry[0]))]
    return shown, len(all_lanes) - len(shown)


def label(lane: Lane) -> str:
    """`engine-0 samples`."""
    return f"{lane.who} {KINDS.get(lane.span, (lane.span, ''))[0]}"


def stretch_bars(run: RunData, lanes: list[Lane], began: float) -> list[Trace]:
    """A trace of horizontal bars for each row; spans of a row that overlap are one bar."""
    found: list[Trace] = []
    for lane in lanes:
        parts = run.events.stretch.get(lane)
        if not parts or run.stretch is None:
            continue
        starts, ends = merged(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
        starts, ends = starts[-BARS:] - began, ends[-BARS:] - began
        if not len(starts):
            continue
        found.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label(lane),
                "y": [label(lane)] * len(starts),
                "base": numbers(starts),
                "x": numbers(ends - starts),
                "customdata": numbers(ends),
                "marker": {"color": f"${KINDS.get(lane.span, ('', 'grey'))[1]}", "line": {"width": 0}},
                "hovertemplate": "%{base:.2f} s to %{customdata:.2f} s (%{x:.3~f} s)<extra>%{y}</extra>",
                "showlegend": False,
            }
        )
    return found


def busy_cells(run: RunData, lanes: list[Lane], began: float, end: float, scale: float) -> list[Trace]:
    """Part of each of `BINS` moments in which a row was busy."""
    if not lanes or end <= began:
        return []
    edges = np.linspace(began, end, BINS + 1)
    cells = [np.diff(run.events.lanes[lane].until(edges)) / np.diff(edges) for lane in lanes]
    middle = (edges[:-1] + edges[1:]) / 2 - began
    trace = heatmap(
        [round(v, 4) for v in (middle / scale).tolist()],
        [label(lane) for lane in lanes],
        [[round(v, 4) for v in row.tolist()] for row in cells],
        hover="%{y} at %{x}: %{z:.0%} of the time",
        colorscale="$busy",
        zmin=0.0,
        zmax=1.0,
        ygap=3,
        showscale=False,
    )
    return [trace]


def _lane_axes(x: str, lanes: list[Lane]) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [label(lane) for lane in lanes],
            "autorange": "reversed",
        },
        "barmode": "overlay",
        "bargap": 0.25,
    }


def _last(run: RunData) -> float | None:
    times = [f["time"].max() for f in (run.steps, run.warmup, run.rollouts)]
    return max((float(t) for t in times if isinstance(t, int | float)), default=None)
