"""Spans: what a role did, from when to when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from moe_asyncrl.telemetry.busy import Busy
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


def overlap(busy: Busy, inside: Busy) -> float | None:
    """Seconds of `inside` in which something of `busy` ran, over the seconds of `inside`; None if there are none."""
    total = inside.seconds()
    return busy.shared(inside) / total if total > 0 else None
