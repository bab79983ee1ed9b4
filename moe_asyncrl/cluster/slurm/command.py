"""`moe-asyncrl launch`: files to values, submission, and with `--wait` the run followed to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_asyncrl.cluster.demo import demo_recipe, recipe_path
from moe_asyncrl.cluster.logs import Tail
from moe_asyncrl.cluster.slurm.call import own_environment
from moe_asyncrl.cluster.slurm.files import supervisor_log
from moe_asyncrl.cluster.slurm.submit import resolved, show, submit
from moe_asyncrl.cluster.status import Standing, standing
from moe_asyncrl.config.load import load_cluster, load_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.telemetry.run_folder import RunFolder

LOOK_S = 0.5
ASK_S = 5.0
"""Between two questions to Slurm's controller."""
EXIT_CODES = {"ok": 0, "stopped": 130}


def launch(recipe_name: str, overrides: Sequence[str], cluster_name: str, *, dry_run: bool, wait: bool) -> int:
    """Submit, or print what would be submitted. Returns the command's exit code; with `wait` that of the run.

    Raises `UserError` or `RecipeError` for what cannot run.
    """
    cluster = load_cluster(cluster_name)
    if dry_run:
        show(resolved(_read(recipe_name, overrides, make=False), cluster, Path.cwd()), cluster, _print)
        return 0
    if cluster.run_folder is not None:
        overrides = [*overrides, f"run.folder={cluster.run_folder}"]
    recipe = resolved(_read(recipe_name, overrides, make=True), cluster, Path.cwd())
    folder = submit(recipe, cluster, own_environment(), _print)
    return follow(folder) if wait else 0


def _read(name: str, overrides: Sequence[str], *, make: bool) -> Recipe:
    """The recipe; `demo` also makes its model and data, unless nothing may be written."""
    if name != "demo":
        return load_recipe(name, overrides)
    return demo_recipe(overrides) if make else load_recipe(recipe_path("demo"), overrides)


def follow(folder: RunFolder) -> int:
    """Print what the job says until it is over. An interrupt leaves the job alone."""
    tail: Tail | None = None
    next_question, waiting = 0.0, ""
    while True:
        over = False
        if time.monotonic() >= next_question:
            now = standing(folder)
            next_question = time.monotonic() + ASK_S
            over = now.alive is False
            if (words := _waiting(now)) and words != waiting:
                waiting = words
                _print(words)
        if tail is None and supervisor_log(folder).exists():
            tail = Tail(supervisor_log(folder), sys.maxsize)
        for line in tail.new() if tail is not None else ():
            _print(line)
        if over:
            break
        time.sleep(LOOK_S)
    if now.summary is None:
        print(f"moe-asyncrl: the job left no summary; see {supervisor_log(folder)}", file=sys.stderr)
        return 1
    if now.summary.error and now.summary.status == "failed":
        print(f"moe-asyncrl: {now.summary.error}", file=sys.stderr)
    return EXIT_CODES.get(now.summary.status, 1)


def _waiting(now: Standing) -> str:
    """Why the job does not run yet, or why that is not known."""
    if now.silent:
        return now.silent
    return next((job.words() for job in now.jobs or () if job.pending), "")


def _print(line: str) -> None:
    print(line, flush=True)
