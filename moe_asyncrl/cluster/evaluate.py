"""`moe-asyncrl eval`: greedy accuracy of an HF checkpoint, on a server started for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_asyncrl.cluster.run_setup import absolute
from moe_asyncrl.config.capability import detect_capabilities
from moe_asyncrl.config.recipe import Recipe


def evaluate_recipe(recipe: Recipe) -> str:
    """One line: accuracy, prompts scored, prompts that could not be. Raises `UserError`."""
    from moe_asyncrl.checkpoint.preflight import check_model
    from moe_asyncrl.rollout.evaluate import evaluate_model

    recipe = absolute(recipe, Path.cwd())
    check_model(recipe)
    with tempfile.TemporaryDirectory(prefix="moe-asyncrl-eval-") as scratch:
        found = evaluate_model(recipe, cpu=not detect_capabilities().cuda, log_path=Path(scratch) / "engine.log")
    failed = f", {found.failed} could not be scored" if found.failed else ""
    return f"accuracy {found.accuracy:.4f} on {found.n} prompts{failed} ({found.seconds:.1f} s)"
