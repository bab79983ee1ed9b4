"""How far a conversion is, on the error output: one line that is renewed on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from moe_asyncrl.telemetry.figures import duration

EVERY_S = 5.0
TERMINAL_EVERY_S = 0.2


class Progress:
    """Counts bytes of `total`, of which `before` were done earlier. Without an output that takes lines it is silent."""

    def __init__(self, what: str, total: int, before: int = 0, out: TextIO | None = None) -> None:
        self._what, self._total, self._before = what, total, before
        self._out: TextIO | None = sys.stderr if out is None else out  # None where the program has no error output
        self._done = 0
        self._began = self._said = time.monotonic()
        self._terminal = self._out is not None and self._out.isatty()
        self._shown = 0

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
        self._end_line()

    def abandon(self) -> None:
        """Leave the terminal's line as it is, and begin a new one."""
        self._end_line()

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
        self._write(f"\r{line.ljust(self._shown)}" if self._terminal else f"{line}\n")
        self._shown = len(line)

    def _end_line(self) -> None:
        if self._terminal:
            self._write("\n")

    def _write(self, text: str) -> None:
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):  # full, closed, or its reader is gone: no reason to stop the work
            self._out = None


def gigabytes(size: int) -> str:
    """`12.3 GB`; small sizes in MB or kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
