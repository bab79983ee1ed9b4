"""`moe-asyncrl top RUN`: how a run stands, from its folder alone. The run may be over, or on other machines."""

from __future__ import annotations

import os
import sys
import time

from moe_asyncrl.cluster.face import DRAW_S, PlainFace, live_console
from moe_asyncrl.cluster.progress import step_line
from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.telemetry.figures import duration, number
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.view import RunLook, View

LOOK_S = 1.0
"""Between two looks without a panel, in seconds."""


def top(run: str, *, once: bool) -> int:
    """Show the run until it is over or Ctrl-C is pressed; with `once`, as it is now. Returns 0.

    On a terminal a panel, elsewhere lines. Raises `UserError` if `run` is no run folder.
    """
    folder, recipe = open_run(run)
    steps = recipe.run.steps
    console = live_console(sys.stdout, os.environ.get("TERM", ""))
    if console is None:
        print("\n".join(lines(RunLook(folder, steps).look(time.time()))), flush=True)
        if not once:
            _follow_in_lines(folder, PlainFace(folder, recipe))
        return 0
    from rich.live import Live

    from moe_asyncrl.telemetry.panel import draw

    look = RunLook(folder, steps)
    view = look.look(time.time())
    if once:
        console.print(draw(view, width=console.width, height=10_000))
        return 0
    with Live(console=console, auto_refresh=False, transient=False) as live:
        try:
            while True:
                live.update(draw(view, width=console.width, height=console.height - 1), refresh=True)
                if view.over:
                    return 0
                time.sleep(DRAW_S)
                view = look.look(time.time())
        except KeyboardInterrupt:
            return 0


def lines(view: View) -> list[str]:
    """The run as plain lines: its status, its newest step, its engines, its last warnings."""
    head = f"{view.status:8}{view.path.name}"
    if view.summary is not None:
        head += f"  {view.summary.steps} steps in {duration(view.summary.seconds)}"
    found = [head]
    if view.error:
        found.append(f"error   {view.error}")
    if view.step:
        accuracy = view.eval.get("accuracy")
        found.append(step_line(view.step, view.total_steps, view.rollout, view.probe, accuracy, view.eta_s))
    elif view.warmup:
        found.append(f"warm-up step {view.warmup['step']:>4}/{view.warmup['of']}  loss {view.warmup['loss']:.4f}")
    for e in view.engines:
        parts = [f"engine  {e.name}", e.state or "", f"version {number(e.version, 'd')}"]
        if e.updated_s is not None:
            parts.append(f"updated {duration(e.updated_s)} ago")
        if e.silent_s is not None:
            parts.append(f"seen {duration(e.silent_s)} ago")
        found.append("  ".join(p for p in parts if p))
    return found + [f"warning {line}" for line in view.warnings]


def _follow_in_lines(folder: RunFolder, face: PlainFace) -> None:
    try:
        while not folder.summary.exists():
            face.refresh()
            time.sleep(LOOK_S)
        face.close()
    except KeyboardInterrupt:
        pass
