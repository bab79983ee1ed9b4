"""Charts of the experts: where sampler and trainer route alike, and how even the load is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_asyncrl.telemetry.expert_load import Load, load_of
from moe_asyncrl.telemetry.report.chart import Chart, Section, Trace, Values, axes, heatmap, line
from moe_asyncrl.telemetry.report.read import RunData

NO_PROBE = "No probe has recorded the routing: a dense model, replay.probe_every is 0, or the run ended too early."


def routing(run: RunData) -> Section:
    """Flips of each layer over time, loads of the newest probe, and their imbalance over time."""
    records = run.routing
    newest = records[-1] if records else None
    layers = [str(n) for n in newest["layers"]] if newest else []
    records = tuple(r for r in records if [str(n) for n in r["layers"]] == layers)
    height = min(640, 170 + 16 * max(6, len(layers)))
    at = f" At step {newest['step']}." if newest else ""
    loads = {side: _shares(newest, side) if newest else [] for side in ("load_sampler", "load_trainer")}
    top = max((v for rows in loads.values() for row in rows for v in row if v is not None), default=1.0)
    steps = np.array([r["step"] for r in records], dtype=np.float64)
    found = {side: [load_of(r[side]) for r in records] for side in loads}

    def over_time(field: str, form: str) -> tuple[Trace, ...]:
        return tuple(
            trace
            for side, colour in (("sampler", "green"), ("trainer", "blue"))
            for trace in line(side, steps, _values(found[f"load_{side}"], field), colour, form=form)
        )

    def load(side: str, title: str) -> Chart:
        rows = loads[side]
        cells = heatmap(
            list(range(len(rows[0]))) if rows else [],
            layers,
            rows,
            hover="layer %{y}, expert %{x}: %{z:.2f} times an even share",
            colorscale="$heat",
            zmin=0.0,
            zmax=max(top, 1.0),
        )
        return Chart(
            side,
            title,
            f"Tokens that each expert got, as a multiple of an even share; both sides have one scale.{at}",
            (cells,) if rows and rows[0] else (),
            _categories(axes("expert", "layer")),
            height=height,
            missing=NO_PROBE,
        )

    flips = heatmap(
        [r["step"] for r in records],
        layers,
        [[r["flips"][i] for r in records] for i in range(len(layers))],
        hover="layer %{y}, step %{x}: %{z:.2%} flipped",
        colorscale="$heat",
        zmin=0.0,
        zmax=max((v for r in records for v in r["flips"] if v), default=1.0),
    )
    flips["colorbar"]["tickformat"] = ".2~%"
    return Section(
        "Experts",
        "From the probes: the same tokens, routed by the sampler and by the trainer on its own.",
        (
            Chart(
                "layer_flips",
                "Flips of each layer",
                "Share of router decisions in which trainer and sampler chose different sets of experts.",
                (flips,) if records and layers else (),
                _categories(axes("step", "layer")),
                height=height,
                missing=NO_PROBE,
            ),
            Chart(
                "imbalance",
                "Load of the busiest expert",
                "Tokens of each layer's busiest expert over an even share, mean of the layers. 1 is perfectly even.",
                over_time("busiest", ".3~f"),
                axes("step", "times an even share"),
                height=height,
                missing=NO_PROBE,
            ),
            Chart(
                "evenness",
                "Evenness of the least even layer",
                "Entropy of the experts' shares over that of even ones, least of the layers. It falls where a router "
                "collapses.",
                over_time("entropy", ".3~f"),
                axes("step", "part of an even load's entropy"),
                height=height,
                missing=NO_PROBE,
            ),
            Chart(
                "idle",
                "Experts without a token",
                "Of all layers, among the tokens of a probe. A few are chance where a probe has few tokens.",
                over_time("idle", ",d"),
                axes("step", "experts", zero=True),
                height=height,
                missing=NO_PROBE,
            ),
            load("load_sampler", "Load of the experts: sampler"),
            load("load_trainer", "Load of the experts: trainer"),
        ),
    )


def _shares(record: dict[str, Any], side: str) -> list[list[float | None]]:
    """Load over an even share, by layer and expert; None for a layer without tokens."""
    found: list[list[float | None]] = []
    for counts in record[side]:
        total = sum(counts)
        found.append([n * len(counts) / total if total else None for n in counts])
    return found


def _values(loads: Sequence[Load | None], field: str) -> Values:
    return np.array([float("nan") if x is None else getattr(x, field) for x in loads], dtype=np.float64)


def _categories(layout: dict[str, Any]) -> dict[str, Any]:
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return layout
