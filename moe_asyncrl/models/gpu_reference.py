"""A tiny random model and its exact answers, for the checks that `make gpu-check` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_tiny_model(folder: Path, *, seed: int = 0) -> Any:
    """A random Qwen3-MoE of 2 layers and 8 experts in `folder`; returns the transformers model, float32 on the CPU.

    Weights are large enough that logits have a standard deviation above 1, so that a wrong path shows.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=256, initializer_range=0.08,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def next_token_logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token after the first under a transformers model: int64 [n] → float64 [n-1]."""
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].double()
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
