"""The models that conversions are tested with, and what transformers computes from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.models.tiny_tokenizer import Alphabet
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.jobs import LENGTHS, tokens_for

AWKWARD: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 269,
    "rope_theta": 5000.0,
}
"""Six query heads a group, square attention matrices, a prime vocabulary, a rotary base that is no default."""
MOE: dict[str, Any] = {**AWKWARD, "num_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 80}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe5": ("qwen3_moe", {**MOE, "num_hidden_layers": 5, "mlp_only_layers": [2], "norm_topk_prob": False}),
    "moe4": ("qwen3_moe", {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [2], "norm_topk_prob": True}),
    "moe4tied": ("qwen3_moe", {**MOE, "num_hidden_layers": 4, "tie_embeddings": True, "norm_topk_prob": False}),
    "tied": ("qwen3", {**AWKWARD, "num_hidden_layers": 4, "tie_embeddings": True}),
    **FAMILY_MODELS,
}


def make(root: Path, name: str, dtype: str = "float32") -> Path:
    """Write model `name` of MODELS below `root`, with weights that tell errors."""
    family, fields = MODELS[name]
    alphabet: Alphabet = "ascii" if name in FAMILY_MODELS else "bytes"
    make_tiny_model(root / name, family, 5, init_std=None, dtype=dtype, alphabet=alphabet, **fields)
    return root / name


def transformers_logits(hf_dir: Path) -> np.ndarray[Any, Any]:
    """[tokens, vocabulary] of the sequences of `tokens_for`, each by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager")
    with torch.no_grad():
        rows = [model(part).logits[0] for part in tokens_for(ModelSpec.from_hf(hf_dir)).split(LENGTHS, dim=1)]
    return torch.cat(rows).numpy()


def changed_copy(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a one-file checkpoint with its tensors changed in place by `change`."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """max |a - b| / max |b|."""
    return float(np.abs(a - b).max() / np.abs(b).max())
