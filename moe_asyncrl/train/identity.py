"""What must be the same for a resume to be one: the order of the prompts, the objective, the model's shape."""

from __future__ import annotations

from pathlib import Path

import xxhash

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.sources.opening import add_to_digest
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo


def recipe_digest(recipe: Recipe) -> str:
    """Digest of what the data cursor means: seed, shuffle, objective, and the sources (bytes, weights, tasks).

    Raises `UserError` if a file cannot be read.
    """
    h = xxhash.xxh3_128()
    r = recipe
    h.update(f"{r.run.seed};{r.data.shuffle};{r.algorithm.objective};".encode())
    if r.algorithm.objective == "sft":
        h.update(f"{r.warmup.batch_size};".encode())
    add_to_digest(h, r.data.train, use="train", seed=r.run.seed)
    return h.hexdigest()


def model_digest(spec: ModelSpec) -> str:
    """Digest of the sizes that give weights their shapes and meaning."""
    sizes = (
        spec.family,
        spec.num_layers,
        spec.hidden_size,
        spec.num_attention_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.intermediate_size,
        spec.moe_intermediate_size,
        spec.num_experts,
        spec.experts_per_token,
        spec.moe_layers,
        spec.vocab_size,
        spec.tie_embeddings,
    )
    return xxhash.xxh3_128(repr(sizes).encode()).hexdigest()


def check_same_run(info: CheckpointInfo, *, recipe_digest: str, model_digest: str, folder: Path) -> None:
    """Raise `UserError` if the checkpoint belongs to another model or another order of prompts."""
    if info.model != model_digest:
        raise UserError(f"{folder}: the checkpoint is of a model of another shape than model.path")
    if info.recipe_digest != recipe_digest:
        raise UserError(
            f"{folder}: run.seed, data.train, data.shuffle or algorithm.objective changed since this checkpoint, so "
            "the prompts that are done cannot be told from the others; restore them, or start a new run"
        )
