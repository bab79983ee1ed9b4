"""Plain progress lines from the run folder. Reads files only."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.telemetry.figures import duration, number
from moe_asyncrl.telemetry.jsonl import JsonlTail
from moe_asyncrl.telemetry.run_folder import RunFolder

WARMUP_LINES = 20
"""Supervised warm-up steps are short: one line for so many."""


class Progress:
    """Turns the metrics of this start into lines to print; those of earlier starts of a resumed run are passed over."""

    def __init__(self, folder: RunFolder, total_steps: int) -> None:
        self._tail = JsonlTail.from_end(folder.metrics_path)
        self._total = total_steps
        self._rollout: dict[str, Any] = {}
        self._probe: dict[str, Any] = {}
        self._accuracy: float | None = None
        self._pace: float | None = None
        self._last: float | None = None

    def lines(self) -> list[str]:
        """Lines for what was recorded since the last call."""
        return [line for m in self._tail.read() if (line := self._line(m))]

    def _line(self, m: dict[str, Any]) -> str | None:
        kind = m.get("kind")
        if kind == "rollout":
            self._rollout = m
        elif kind == "probe":
            self._probe = m
        elif kind == "eval":
            self._accuracy = float(m["accuracy"])
            failed = f", {m['failed']} could not be scored" if m.get("failed") else ""
            return f"eval    version {m['version']:>4}  accuracy {m['accuracy']:.3f} on {m['n']} prompts{failed}"
        elif kind == "warmup" and (m["step"] % WARMUP_LINES == 0 or m["step"] in (1, m["of"])):
            return f"warm-up step {m['step']:>4}/{m['of']}  loss {m['loss']:.4f}"
        elif kind == "step":
            return self._step(m)
        return None

    def _step(self, m: dict[str, Any]) -> str:
        now = float(m["time"])
        if self._last is not None:
            took = now - self._last
            self._pace = took if self._pace is None else 0.9 * self._pace + 0.1 * took
        self._last = now
        eta = None if self._pace is None else self._pace * (self._total - int(m["step"]))
        return step_line(m, self._total, self._rollout, self._probe, self._accuracy, eta)


def step_line(
    m: dict[str, Any],
    total: int,
    rollout: dict[str, Any],
    probe: dict[str, Any],
    accuracy: float | None,
    eta_s: float | None,
) -> str:
    """One step as a line: its record, the newest of the other kinds, and the seconds to the end."""
    parts = [f"step {m['step']:>4}/{total}"]
    for label, value, form in (
        ("reward", m.get("reward"), ".3f"),
        ("loss", m.get("loss") if m.get("reward") is None else None, ".4f"),
        ("accuracy", accuracy, ".3f"),
        ("train tok/s", m.get("trained_tokens_per_s"), ",.0f"),
        ("sample tok/s", rollout.get("sampled_tokens_per_s"), ",.0f"),
        ("staleness", m.get("staleness_mean"), ".2f"),
    ):
        if value is not None:
            parts.append(f"{label} {value:{form}}")
    if m.get("buffer_held") is not None:
        parts.append(f"buffer {m['buffer_held']}/{m['buffer_capacity']}")
    if m.get("coverage") is not None:
        parts.append(f"coverage {m['coverage']:.3f} flips {number(m.get('flip_rate'), '.4f')}")
    if probe.get("kl_replay") is not None:
        parts.append(f"KL {probe['kl_replay']:.1e} (live {number(probe.get('kl_live'), '.1e')})")
    if eta_s is not None:
        parts.append(f"ETA {duration(eta_s)}")
    return "  ".join(parts)
