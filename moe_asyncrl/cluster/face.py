"""What a supervised run shows on standard output: lines, or a live panel where that is a terminal.

Both only read the run folder. The supervisor calls `refresh` again and again from its own loop, so that there is no
second thread that draws, and nothing to race with its signals.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from moe_asyncrl.cluster.progress import Progress
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.telemetry.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

DRAW_S = 0.5
"""Between two pictures of the panel, in seconds."""
LEAST_WIDTH, LEAST_HEIGHT = 40, 10
"""A smaller terminal gets lines."""


class Face(Protocol):
    """What the supervisor talks to."""

    def say(self, line: str) -> None:
        """Show a line that stays."""
        ...

    def refresh(self) -> None:
        """Show what is new in the run folder; cheap when called often."""
        ...

    def close(self) -> None:
        """Show what is still missing and leave the terminal as a line-printing command does. Idempotent."""
        ...


class PlainFace:
    """Lines."""

    def __init__(self, folder: RunFolder, recipe: Recipe, *, say: Callable[[str], None] | None = None) -> None:
        self._progress = Progress(folder, recipe.run.steps)
        self.say = say if say is not None else _print

    def refresh(self) -> None:
        """New lines."""
        for line in self._progress.lines():
            self.say(line)

    def close(self) -> None:
        """The last lines."""
        self.refresh()


class LiveFace:
    """The panel, redrawn in place; lines appear above it. When it is closed, it gives way to the last step's line."""

    def __init__(self, folder: RunFolder, recipe: Recipe, console: Console) -> None:
        from rich.live import Live

        from moe_asyncrl.telemetry.view import RunLook

        self._console = console
        self._progress = Progress(folder, recipe.run.steps)
        self._last_step: str | None = None
        self._look = RunLook(folder, recipe.run.steps)
        self._drawn = 0.0
        # Output of others is not caught: the supervisor is the only one that writes here.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def say(self, line: str) -> None:
        """Above the panel."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the panel if the last picture is old enough."""
        for line in self._progress.lines():
            if line.startswith("step"):
                self._last_step = line
            elif line.startswith("eval"):
                self.say(line)
        if time.monotonic() - self._drawn >= DRAW_S and self._live.is_started:
            self._drawn = time.monotonic()
            self._draw()

    def _draw(self) -> None:
        from moe_asyncrl.telemetry.panel import draw

        size = self._console.size
        # One line is left free for the cursor: a panel as high as the terminal would scroll.
        self._live.update(draw(self._look.look(time.time()), width=size.width, height=size.height - 1), refresh=True)

    def close(self) -> None:
        """Take the panel away."""
        if self._live.is_started:
            self.refresh()
            self._live.stop()
            if self._last_step is not None:
                self.say(self._last_step)


def live_console(stream: TextIO, environment_term: str) -> Console | None:
    """A console for a panel on `stream`; None where there is no terminal that can draw one."""
    if not stream.isatty() or environment_term in ("", "dumb", "unknown"):
        return None
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return console if console.width >= LEAST_WIDTH and console.height >= LEAST_HEIGHT else None


def face_for(folder: RunFolder, recipe: Recipe) -> Face:
    """The face for this process's standard output."""
    console = live_console(sys.stdout, os.environ.get("TERM", "")) if recipe.telemetry.console == "auto" else None
    return LiveFace(folder, recipe, console) if console is not None else PlainFace(folder, recipe)


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
