"""Warnings and errors in the logs of a run's roles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moe_asyncrl.telemetry.view import tail_text

LOGS = 64
"""Logs that are read, the newest ones first."""
LOG_BYTES = 512 * 1024
"""End of a log that is read."""

_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (WARNING|ERROR|CRITICAL) [\w.]+: (.+)$", re.MULTILINE)
_DIGITS = re.compile(r"\d+")


@dataclass
class Problem:
    """Lines that say the same, up to numbers."""

    role: str
    level: str
    first: str
    """Time of the first of them, as in the log."""
    last: str
    count: int
    text: str
    """The last of them."""


def problems(folder: Path) -> list[Problem]:
    """What the roles warned of, by its last time; SGLang's own logs are left out, as they warn of every start."""
    try:
        logs = [(p, p.stat().st_mtime) for p in folder.glob("*.log") if not p.name.endswith("-sglang.log")]
    except OSError:
        return []
    found: dict[tuple[str, str, str], Problem] = {}
    for path, _ in sorted(logs, key=lambda entry: -entry[1])[:LOGS]:
        for time, level, text in _LINE.findall(tail_text(path, LOG_BYTES)):
            key = (path.stem, level, _DIGITS.sub("#", text))
            if key in found:
                p = found[key]
                p.last, p.count, p.text = time, p.count + 1, text
            else:
                found[key] = Problem(path.stem, level, time, time, 1, text)
    return sorted(found.values(), key=lambda p: p.last)
