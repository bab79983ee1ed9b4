"""Spans: what a role did, from when to when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from moe_asyncrl.telemetry.jsonl import JsonlWriter


@contextlib.contextmanager
def span(events: JsonlWriter, role: str, name: str, **extra: Any) -> Iterator[dict[str, Any]]:
    """Record a span also when its body raises. The yielded dict takes further fields while the body runs."""
    fields: dict[str, Any] = dict(extra)
    start = time.time()
    try:
        yield fields
    except BaseException as error:
        fields["error"] = f"{type(error).__name__}: {error}"[:300]
        raise
    finally:
        events.append({"role": role, "span": name, "start": start, "end": time.time(), **fields})


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint, sorted intervals that cover the same points."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(busy: Iterable[tuple[float, float]], inside: Iterable[tuple[float, float]]) -> float | None:
    """Seconds of `inside` in which something of `busy` ran, over the seconds of `inside`; None if there are none."""
    a, b = union(busy), union(inside)
    total = sum(end - start for start, end in b)
    if total <= 0:
        return None
    common, i = 0.0, 0
    for start, end in b:
        while i < len(a) and a[i][1] <= start:
            i += 1
        j = i
        while j < len(a) and a[j][0] < end:
            common += min(end, a[j][1]) - max(start, a[j][0])
            j += 1
    return common / total
