"""How far a conversion is, on the error output: one line that is renewed on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from moe_asyncrl.telemetry.figures import duration

EVERY_S = 5.0
TERMINAL_EVERY_S = 0.2


class Progress:
    """Counts bytes of `total`, of which `before` were done earlier."""

    def __init__(self, what: str, total: int, before: int = 0, out: TextIO | None = None) -> None:
        self._what, self._total, self._before = what, total, before
        self._out = sys.stderr if out is None else out
        self._done = 0
        self._began = self._said = time.monotonic()
        self._terminal = self._out.isatty()

    def add(self, size: int) -> None:
        """More bytes are done."""
        self._done += size
        now = time.monotonic()
        if now - self._said >= (TERMINAL_EVERY_S if self._terminal else EVERY_S):
            self._said = now
            self._say(self.line(now - self._began))

    def finish(self) -> None:
        """Say the last figures."""
        self._say(self.line(max(1e-9, time.monotonic() - self._began)))
        if self._terminal:
            print(file=self._out, flush=True)

    def abandon(self) -> None:
        """Leave the terminal's line as it is, and begin a new one."""
        if self._terminal:
            print(file=self._out, flush=True)

    def line(self, seconds: float) -> str:
        """The figures `seconds` after the start."""
        done = min(self._total, self._before + self._done)
        rate = self._done / seconds if seconds > 0 else 0.0
        part = done / self._total if self._total else 1.0
        parts = [f"{self._what}  {gigabytes(done)} of {gigabytes(self._total)}", f"{100 * part:.0f} %"]
        parts.append(f"{rate / 1e6:,.0f} MB/s")
        if 0 < done < self._total and rate > 0:
            parts.append(f"ETA {duration((self._total - done) / rate)}")
        return "  ".join(parts)

    def _say(self, line: str) -> None:
        print(f"\r{line}\x1b[K" if self._terminal else line, end="" if self._terminal else "\n", file=self._out)
        self._out.flush()


def gigabytes(size: int) -> str:
    """`12.3 GB`; small sizes in MB or kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
