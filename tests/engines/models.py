"""Tiny random models made by transformers, and what transformers itself says about their tokens."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from moe_asyncrl.engine.completion import RoutingShape

VOCABULARY = 512
EOS = 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def _config(family: str) -> Any:
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**COMMON, **MOE, num_experts=8, norm_topk_prob=True)
    if family == "qwen3":
        return transformers.Qwen3Config(**COMMON)
    if family == "glm4_moe":
        # One leading dense layer, so that rows of routers and numbers of layers differ.
        return transformers.Glm4MoeConfig(
            **COMMON, **MOE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True
        )
    raise ValueError(f"no test model of family {family}")


def make_model(family: str, path: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Write an HF directory (config and weights, no tokenizer)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_config(family)).float()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name:
            torch.nn.init.normal_(value, std=0.1)
    model.save_pretrained(path)
    return path


def routing_shape(path: pathlib.Path) -> RoutingShape | None:
    """From the configuration as transformers reads it; None for a dense model."""
    config = transformers.AutoConfig.from_pretrained(path)
    experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    if experts is None:
        return None
    dense = getattr(config, "first_k_dense_replace", 0)
    layers = tuple(i >= dense for i in range(config.num_hidden_layers))
    return RoutingShape(moe_layers=layers, top_k=config.num_experts_per_tok, num_experts=experts)


@dataclasses.dataclass
class Reference:
    """transformers' float32 model over one HF directory."""

    path: pathlib.Path

    @functools.cached_property
    def model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [T, vocabulary]"""
        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0]

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float32 [n]: of each output token given what stands before it."""
        ids = [*map(int, prompt), *map(int, output)]
        rows = self.logits(ids)[len(prompt) - 1 : -1] / temperature
        picked = torch.log_softmax(rows, -1).gather(1, torch.tensor(ids[len(prompt) :])[:, None])
        return picked[:, 0].numpy()

    def experts(self, ids: Sequence[int]) -> np.ndarray:
        """int64 [T, MoE layers, K]: the routers' choices, best first."""
        seen: list[torch.Tensor] = []
        k = self.model.config.num_experts_per_tok

        def record(module: Any, inputs: Any, output: Any) -> None:
            scores = output[0] if isinstance(output, tuple) else output
            bias = getattr(module, "e_score_correction_bias", None)
            if bias is not None:
                scores = scores.sigmoid() + bias
            seen.append(torch.topk(scores.float(), k, -1).indices)

        gates = [m.mlp.gate for m in self.model.model.layers if hasattr(m.mlp, "gate")]
        hooks = [g.register_forward_hook(record) for g in gates]
        try:
            self.logits(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(seen, 1).numpy()
