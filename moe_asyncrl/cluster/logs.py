"""`moe-asyncrl logs RUN [ROLE]`: what the roles wrote, and go on writing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moe_asyncrl.cluster.status import open_folder, standing
from moe_asyncrl.data.errors import UserError

LOOK_S = 0.5
ALIVE_S = 10.0
"""Between two looks whether the run still goes on: for a Slurm job that asks the controller."""
TAIL_BYTES = 256 * 1024
"""Most of a log that is read at once."""


def show_logs(run: str, role: str | None, *, lines: int, follow: bool, say: Callable[[str], None]) -> None:
    """Print the last lines of a role's log, or of all logs with the role in front; `follow` until the run ends.

    Raises `UserError` for a folder that is no run, or a role without a log.
    """
    folder = open_folder(run)
    tails: dict[str, Tail] = {}

    def look() -> None:
        paths = sorted(folder.logs.glob("*.log"))
        for path in paths:
            if path.stem not in tails and (role is None or path.stem == role):
                tails[path.stem] = Tail(path, lines)

    def drain() -> None:
        for name, tail in tails.items():
            for line in tail.new():
                say(line if role is not None else f"{name:<16} {line}")

    look()
    if role is not None and role not in tails:
        known = ", ".join(sorted(path.stem for path in folder.logs.glob("*.log"))) or "none yet"
        raise UserError(f"{folder.path}: no log of {role!r}; there are: {known}")
    drain()
    next_look = 0.0
    while follow:
        if time.monotonic() >= next_look:
            over = standing(folder).alive is False
            next_look = time.monotonic() + ALIVE_S
            if over:
                drain()
                return
        time.sleep(LOOK_S)
        look()
        drain()


class Tail:
    """New whole lines of a log, first its last ones."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._first = lines
        self._at = max(0, path.stat().st_size - TAIL_BYTES)
        self._begun = False

    def new(self) -> list[str]:
        """Lines since the last call."""
        with self._path.open("rb") as f:
            f.seek(self._at)
            block = f.read()
        whole = block.rfind(b"\n") + 1
        self._at += whole
        found = block[:whole].decode("utf-8", "replace").splitlines()
        if not self._begun:
            self._begun = True
            found = found[-self._first :] if self._first else []
        return found
