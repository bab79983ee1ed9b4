"""Charts of what was learned, and of how far sampler and trainer were apart."""

from __future__ import annotations

import numpy as np

from moe_asyncrl.telemetry.report.chart import Chart, Section, Trace, axes, column, line, numbers
from moe_asyncrl.telemetry.report.read import RunData

STALE_SHOWN = 8
"""Staleness from here on is one colour."""
STALE_BARS = 240
"""Bars at most; each of them stands for several steps of a long run."""


def learning(run: RunData) -> Section:
    """Reward, accuracy, and what the optimizer says."""
    steps = run.steps if run.steps.height else run.warmup
    what = "step" if run.steps.height else "supervised step"
    x = column(steps, "step")
    reward = line("reward", column(run.steps, "step"), column(run.steps, "reward"), "blue", trend=True)
    accuracy = line("accuracy", column(run.evals, "version"), column(run.evals, "accuracy"), "green")
    return Section(
        "What was learned",
        "",
        (
            Chart(
                "reward",
                "Reward",
                "Mean reward of the trajectories that each step was trained on.",
                tuple(reward),
                axes("step", "reward"),
                missing="No step has a reward: nothing was sampled and trained yet, or the run is a supervised one.",
            ),
            Chart(
                "accuracy",
                "Accuracy on held-out prompts",
                "Mean score of greedy answers to prompts that are never trained on, by the version of the weights.",
                tuple(accuracy),
                axes("version of the weights", "accuracy", zero=True),
                missing="No evaluation: the recipe has no data.eval, or the run ended before the first one.",
            ),
            Chart(
                "loss",
                "Loss",
                "The objective that the step minimised. In policy optimisation it moves around 0 and need not fall.",
                tuple(line("loss", x, column(steps, "loss"), "blue", trend=True)),
                axes(what, "loss"),
                missing="No step was trained.",
            ),
            Chart(
                "entropy",
                "Entropy",
                "Mean uncertainty of the policy over the next token. Near 0 it has stopped to try things.",
                tuple(line("entropy", column(run.steps, "step"), column(run.steps, "entropy"), "purple", trend=True)),
                axes("step", "nats", zero=True),
                missing="No entropy was measured.",
            ),
            Chart(
                "grad_norm",
                "Gradient norm",
                "Length of the gradient before clipping. Peaks that grow are the first sign of an unstable run.",
                tuple(line("gradient norm", x, column(steps, "grad_norm"), "orange")),
                axes(what, "norm", zero=True),
                missing="No step was trained.",
            ),
            Chart(
                "lr",
                "Learning rate",
                "What each step was scaled with, after warm-up and schedule.",
                tuple(line("learning rate", x, column(steps, "lr"), "teal", form=".3~e")),
                axes(what, "learning rate", zero=True, form=".1e"),
                missing="No step was trained.",
            ),
        ),
    )


def off_policy(run: RunData) -> Section:
    """Staleness, KL and flips."""
    probed = column(run.probes, "step")
    replay = line("with replay", probed, column(run.probes, "kl_replay"), "blue", form=".2e")
    live = line("without replay", probed, column(run.probes, "kl_live"), "orange", form=".2e")
    x = column(run.steps, "step")
    flips = line("flips", x, column(run.steps, "flip_rate"), "red", trend=True)
    known = line("reported by the sampler", x, column(run.steps, "coverage"), "blue")
    same = line("of the token's version", x, column(run.steps, "coverage_same_version"), "orange")
    reference = line("KL to the reference", x, column(run.steps, "kl_reference"), "purple", trend=True, form=".2e")
    charts = [
        Chart(
            "staleness",
            "Staleness of what was trained",
            "Share of the trajectories of a step by how many versions older than the trainer their oldest token was.",
            tuple(staleness_bars(run)),
            {**axes("step", "share of trajectories", form=".0%"), "barmode": "stack", "bargap": 0},
            missing="No step says how stale its trajectories were.",
        ),
        Chart(
            "kl",
            "KL between trainer and sampler",
            "Measured on tokens of the trainer's own version, so only numbers and routing differ. "
            "Replaying the sampler's experts should keep it low.",
            (*replay, *live),
            axes("step", "KL, nats a token", log=(*replay, *live)),
            missing="No probe was made: replay.probe_every is 0, or the run ended before the first one.",
        ),
        Chart(
            "flip_rate",
            "Router decisions that flipped",
            "Share of decisions in which the trainer's router would have chosen other experts than the sampler did.",
            tuple(flips),
            axes("step", "share", zero=True, form=".2~%"),
            missing="No flips were counted: a dense model, or replay is off.",
        ),
        Chart(
            "coverage",
            "Routing that could be replayed",
            "Share of token positions whose experts the sampler reported, and of those routed by the very weights that "
            "sampled their token. The first one should be 1.",
            (*known, *same),
            axes("step", "share", zero=True, form=".0%"),
            missing="No routing was replayed: a dense model, or replay is off.",
        ),
    ]
    if reference:
        charts.append(
            Chart(
                "kl_reference",
                "KL to the reference model",
                "How far the policy has moved from the model that it is held to.",
                tuple(reference),
                axes("step", "KL, nats a token", zero=True),
            )
        )
    return Section(
        "How far sampler and trainer were apart",
        "The engines sample while the trainer learns, so what is trained on may be some versions old.",
        tuple(charts),
    )


def staleness_bars(run: RunData) -> list[Trace]:
    """Stacked shares, a trace for each staleness; steps are added up to at most `STALE_BARS` bars."""
    rows = run.steps.filter(run.steps["staleness_histogram"].list.len() > 0)
    if not rows.height:
        return []
    counts = np.zeros((rows.height, STALE_SHOWN + 1))
    for i, histogram in enumerate(rows["staleness_histogram"].to_list()):
        for stale, n in enumerate(histogram):
            counts[i, min(stale, STALE_SHOWN)] += n or 0
    width = -(-rows.height // STALE_BARS)
    starts = np.arange(0, rows.height, width)
    summed = np.add.reduceat(counts, starts, axis=0)
    shares = summed / np.maximum(summed.sum(axis=1, keepdims=True), 1)
    steps = rows["step"].to_numpy()
    first, last = steps[starts], steps[np.minimum(starts + width, rows.height) - 1]
    middle = (first + last) / 2
    names = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    found: list[Trace] = []
    for stale in range(int(np.flatnonzero(summed.sum(axis=0)).max(initial=0)) + 1):
        label = "1 version" if stale == 1 else f"{stale} versions" if stale < STALE_SHOWN else f"{stale} or more"
        found.append(
            {
                "type": "bar",
                "name": label,
                "x": numbers(middle),
                "y": numbers(shares[:, stale]),
                "width": numbers((last - first + 1).astype(np.float64)),
                "customdata": [[name, int(n)] for name, n in zip(names, summed[:, stale].tolist(), strict=True)],
                "marker": {"color": f"$stale{stale}", "line": {"width": 0}},
                "hovertemplate": "step %{customdata[0]}: %{y:.1%} (%{customdata[1]:,})" + f"<extra>{label} old</extra>",
            }
        )
    return found
