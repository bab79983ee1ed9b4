"""Somebody who looks at a run while it runs, as a person and a Prometheus would, and remembers what was seen."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path

from tests.cluster.terminal import Terminal
from tests.system.command import COMMAND

SCRAPE_S = 0.5


class Onlooker:
    """`moe-asyncrl top` in a terminal, and every role's figures, again and again until the run is over."""

    def __init__(self, folder: Path) -> None:
        self.frames: list[list[str]] = []
        """Different pictures of the terminal, in order."""
        self.scraped: dict[str, str] = {}
        """The last text that each role served, by the role that its target is marked with."""
        self.labels: set[str] = set()
        """Runs that the targets are marked with."""
        self.cursor_shown = False
        self.code: int | None = None
        self._folder = folder
        self._terminal = Terminal([str(COMMAND), "top", str(folder)], cwd=folder.parent)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Wait for the end of `top`, which ends with the run."""
        self._thread.join(limit_s)
        with self._terminal as terminal:
            self.code = terminal.process.poll()
            self.cursor_shown = terminal.screen.cursor_shown

    def _look(self) -> None:
        scraped = 0.0
        while self._terminal.read():
            frame = self._terminal.screen.visible()
            if not self.frames or frame != self.frames[-1]:
                self.frames.append(frame)
            if time.monotonic() - scraped > SCRAPE_S:
                self._scrape()
                scraped = time.monotonic()
        self._terminal.process.wait(30)

    def _scrape(self) -> None:
        for path in sorted((self._folder / "endpoints" / "prometheus").glob("*.json")):
            try:
                targets = json.loads(path.read_text())
            except FileNotFoundError:  # its role has just ended
                continue
            for target in targets:
                self.labels.add(target["labels"]["run"])
                try:
                    with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as reply:
                        self.scraped[target["labels"]["role"]] = reply.read().decode()
                except OSError:  # as a Prometheus would: next time
                    continue
