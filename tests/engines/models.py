"""Tiny random models made by transformers, and what transformers itself says about their tokens."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_asyncrl.engine.completion import RoutingShape
from moe_asyncrl.models.tiny import make_tiny_model

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
AWKWARD: dict[str, Any] = {
    **COMMON,
    "vocab_size": 521,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "head_dim": 24,
    "intermediate_size": 112,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
"""Three query heads a group, a prime vocabulary, no power of two: what is padded or transposed by mistake shows."""
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GROUPED: dict[str, Any] = {
    "vocab_size": 521,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 1024,
    "rope_theta": 5000.0,
}
YARN: dict[str, Any] = {
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        # Queries, keys, values and the latent all of different widths.
        "vocab_size": 521,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "intermediate_size": 80,
        "n_routed_experts": 12,
        "max_position_embeddings": 1024,
        "rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "minimax_m2": {**GROUPED, "intermediate_size": 40, "rotary_dim": 12},
    "gpt_oss": {
        **GROUPED,
        "intermediate_size": 40,
        "sliding_window": 6,
        "swiglu_limit": 0.8,
        "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False},
    },
}
"""Families whose `config.json` has, as published, fields that SGLang asks for and transformers does not write."""
UNREAD: dict[str, dict[str, Any]] = {
    "minimax_m2": {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    }
}
"""Published fields that only SGLang reads."""


def _config(family: str) -> Any:
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**COMMON, **MOE, num_experts=8, norm_topk_prob=True)
    if family == "qwen3":
        return transformers.Qwen3Config(**COMMON)
    if family == "mixtral":
        return transformers.MixtralConfig(
            **{**AWKWARD, "head_dim": 16, "intermediate_size": 40}, num_local_experts=6, num_experts_per_tok=3
        )
    if family == "glm4_moe":
        # One leading dense layer, so that rows of routers and numbers of layers differ.
        return transformers.Glm4MoeConfig(
            **AWKWARD,
            moe_intermediate_size=40,
            num_experts_per_tok=3,
            n_routed_experts=6,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            use_qk_norm=True,
        )
    raise ValueError(f"no test model of family {family}")


def make_model(family: str, path: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Write an HF directory (config and weights, no tokenizer)."""
    if family in PUBLISHED:
        make_tiny_model(path, family, seed, init_std=None, **PUBLISHED[family])
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **UNREAD.get(family, {})}))
        weights = load_file(path / "model.safetensors")
        for name, value in weights.items():
            if name.endswith(".sinks"):  # SGLang keeps them in bfloat16
                weights[name] = value.bfloat16().float()
            elif value.dim() > 1:
                # Calmer than other random models, in which transformers itself is 4e-5 from float64.
                value *= 0.6 if name == "lm_head.weight" else 0.36
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path
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
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((found for name in names if (found := getattr(config, name, None))), None)
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

        def record(module: Any, inputs: Any, output: Any) -> None:
            logits, _, chosen = output
            bias = inputs[1] if len(inputs) > 1 else getattr(module, "e_score_correction_bias", None)
            scores = logits.float() if bias is None else logits.float().sigmoid() + bias
            seen.append(chosen.gather(-1, scores.gather(-1, chosen).argsort(-1, descending=True)))

        routers = [m for m in self.model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        hooks = [router.register_forward_hook(record) for router in routers]
        try:
            self.logits(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(seen, 1).numpy()
