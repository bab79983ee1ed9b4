"""`moe-asyncrl demo`: makes a tiny model and additions, then runs the demo recipe on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.arithmetic import additions, careless, write_lines, write_prompts
from moe_asyncrl.data.errors import UserError

NUMBERS_BELOW = 100
HELD_OUT = 200
FORGETS = 0.65
"""How often the warm-up's pupil forgets to carry: most often, so that the greedy answer is the wrong one."""
MODEL_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "alphabet": "ascii",
    "init_std": 0.08,
}
"""1.8 million parameters, about a third of them active: small enough for two cores, a real mixture of experts."""


def recipe_path(name: str) -> Path:
    """A recipe that comes with the project. Raises `UserError` if the project was installed without them."""
    path = Path(__file__).resolve().parents[2] / "configs" / "recipes" / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"{path}: recipe not found; run from a clone of the project installed with pip install -e")
    return path


def demo_recipe(overrides: Sequence[str]) -> Recipe:
    """Make model and data beside the run folders (same seed, same bytes) and return the recipe that uses them."""
    from moe_asyncrl.models.tiny import make_tiny_model

    first = load_recipe(recipe_path("demo"), overrides)
    seed = first.run.seed
    base = Path(first.run.folder) / f"demo-inputs-seed{seed}"
    training, held_out = additions(below=NUMBERS_BELOW, held_out=HELD_OUT, seed=seed)
    write_prompts(base / "train.jsonl", training)
    write_prompts(base / "eval.jsonl", held_out)
    write_lines(base / "warmup.jsonl", careless(training, forgets=FORGETS, times=4, seed=seed))
    model = base / "model"
    if not (model / "model.safetensors").exists():
        make_tiny_model(model, "qwen3_moe", seed, **MODEL_SHAPE)
    inputs = [
        f"model.path={model}",
        f"data.train={base / 'train.jsonl'}",
        f"data.eval={base / 'eval.jsonl'}",
        f"warmup.data={base / 'warmup.jsonl'}",
    ]
    return load_recipe(recipe_path("demo"), [*inputs, *overrides])
