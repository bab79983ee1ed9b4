"""The figures at the top of a report, each with a sentence on what it means, and what was run."""

from __future__ import annotations

from typing import Any

import msgspec

from moe_asyncrl.telemetry.figures import duration, number
from moe_asyncrl.telemetry.report.read import RunData

STATUS = {
    "ok": "The run has done all of its steps.",
    "stopped": "The run was stopped before its last step. It can be resumed from its newest checkpoint.",
    "failed": "The run ended with an error.",
    "running": "The run goes on. Headline figures are written when it ends; the charts show what there is so far.",
    "finishing": "The run has done its steps and is about to end.",
    "starting": "The run has only just started.",
    "warm-up": "The run is at its supervised steps before reinforcement learning.",
    "silent": "The run has not ended, and nothing was heard of it for a while.",
}


class Figure(msgspec.Struct, frozen=True):
    """One figure."""

    name: str
    value: str
    text: str


def headline(run: RunData) -> list[Figure]:
    """From `summary.json`; while there is none, the little that is known without it."""
    s = run.summary
    if s is None:
        done = run.steps["step"].max() if run.steps.height else None
        at = int(done) if isinstance(done, int) else 0
        of = _get(run.recipe, "run", "steps")
        return [
            Figure("Steps so far", f"{at:,}" + (f" of {of:,}" if isinstance(of, int) else ""), "Updates of the policy.")
        ]
    t = s.trajectories
    figures = [
        Figure("Steps", f"{s.steps:,}", "Updates of the policy that the trainer has done."),
        Figure("Time", duration(s.seconds), "From the start of the run to its end, engines' start included."),
    ]
    if s.accuracy_after is not None:
        figures.append(
            Figure(
                "Accuracy",
                f"{number(s.accuracy_before, '.3f')} → {number(s.accuracy_after, '.3f')}",
                "Mean score of greedy answers to held-out prompts, before and after.",
            )
        )
    figures += [
        Figure(
            "Overlap",
            number(s.overlap, ".0%"),
            "Part of the time inside trainer steps in which an engine was sampling too.",
        ),
        Figure("Largest staleness", number(s.staleness_max, "d"), "Versions between sampling and training, at worst."),
        Figure(
            "KL with replay",
            number(s.kl_replay, ".1e"),
            "Trainer against sampler, in nats a token, when the trainer uses the sampler's experts.",
        ),
        Figure("KL without", number(s.kl_live, ".1e"), "The same when the trainer's own router chooses the experts."),
        Figure(
            "Replay coverage",
            number(s.replay_coverage, ".2%"),
            "Trained positions whose experts the sampler reported.",
        ),
        Figure(
            "Of the same version",
            number(s.coverage_same_version, ".2%"),
            "Trained positions that were routed by the very weights that sampled their token.",
        ),
        Figure("Weight updates", f"{s.weight_versions:,}", "Versions of the weights that the engines were given."),
        Figure(
            "Trajectories",
            f"{t.trained:,} of {t.sampled:,}",
            f"Trained, of all sampled; {t.stale:,} were too old, {t.filtered:,} filtered, {t.failed:,} failed.",
        ),
    ]
    return [f for f in figures if f.value != "-"]


def what_was_run(recipe: dict[str, Any]) -> list[tuple[str, str]]:
    """The few settings that tell one run from another."""
    rows: list[tuple[str, str]] = []

    def add(name: str, *parts: str) -> None:
        known = [p for p in parts if p]
        if known:
            rows.append((name, ", ".join(known)))

    def value(form: str, section: str, field: str) -> str:
        found = _get(recipe, section, field)
        return "" if found is None or isinstance(found, dict | list) else form.format(found)

    model = str(_get(recipe, "model", "path") or "")
    add("Model", model.rstrip("/").rpartition("/")[2])
    add("Objective", value("{}", "algorithm", "objective"), value("learning rate {:g}", "optimizer", "lr"))
    add(
        "Batch",
        value("{} prompts a step", "rollout", "groups_per_step"),
        value("{} samples each", "rollout", "group_size"),
        value("at most {} new tokens", "rollout", "max_new_tokens"),
    )
    add("Engines", value("{} servers", "engine", "count"), value("TP{}", "engine", "tp"), value("EP{}", "engine", "ep"))
    add("Trainer", *(value(f"{n.upper()}{{}}", "trainer", n) for n in ("dp", "tp", "pp", "cp", "ep")))
    add("Staleness", value("at most {} versions", "buffer", "max_staleness"))
    add("Routing replay", value("{}", "replay", "mode"))
    add("Seed", value("{}", "run", "seed"))
    return rows


def _get(recipe: dict[str, Any], section: str, field: str) -> Any:
    found = recipe.get(section)
    return found.get(field) if isinstance(found, dict) else None
