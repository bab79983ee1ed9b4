"""What one role did, from the end of `events.jsonl`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from moe_asyncrl.telemetry.jsonl import JsonlTail

CHUNK = 1 << 20
"""Bytes read at once."""


class SpanFigures:
    """Counts of one role's spans since this was made. For an engine also what others sampled with it."""

    def __init__(self, path: Path, role: str, *, from_start: bool = False) -> None:
        self._tail = JsonlTail(path) if from_start else JsonlTail.from_end(path)
        self._role = role
        self._named = f'"{role}"'.encode()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Inside spans of a name."""
        self.count: defaultdict[str, int] = defaultdict(int)
        """Spans of a name."""
        self.errors: defaultdict[str, int] = defaultdict(int)
        """Spans of a name that ended with an error."""
        self.tokens = 0.0
        """Sampled by this rollout worker, or on this engine."""
        self.requests = 0.0

    def refresh(self) -> None:
        """Read what is new."""
        while True:
            before = self._tail.offset
            for e in self._tail.read(CHUNK, only=self._named):
                own, engine = e.get("role") == self._role, e.get("engine") == self._role
                span, start, end = e.get("span"), e.get("start"), e.get("end")
                if not isinstance(span, str) or not isinstance(start, int | float) or not isinstance(end, int | float):
                    continue
                if own:
                    self.seconds[span] += end - start
                    self.count[span] += 1
                    self.errors[span] += "error" in e
                if (own or engine) and span == "generate":
                    self.tokens += _number(e.get("tokens"))
                    self.requests += _number(e.get("requests"))
            if self._tail.offset == before:
                return


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
