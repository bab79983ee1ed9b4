"""Charts of the experts: where sampler and trainer route alike, and how even the load is."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_asyncrl.telemetry.report.chart import Chart, Section, axes, heatmap, line
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
    uneven = {side: np.array([_imbalance(r, side) for r in records], dtype=np.float64) for side in loads}

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
                (
                    *line("sampler", steps, uneven["load_sampler"], "green", form=".3~f"),
                    *line("trainer", steps, uneven["load_trainer"], "blue", form=".3~f"),
                ),
                axes("step", "times an even share"),
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


def _imbalance(record: dict[str, Any], side: str) -> float:
    busiest = [max(counts) * len(counts) / sum(counts) for counts in record[side] if sum(counts)]
    return sum(busiest) / len(busiest) if busiest else float("nan")


def _categories(layout: dict[str, Any]) -> dict[str, Any]:
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return layout
