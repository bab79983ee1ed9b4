"""Models of every family in awkward shapes: six query heads a group, three experts a token, 5 and 7 layers."""

from __future__ import annotations

from typing import Any

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
"""A stretching whose blend of frequencies and scales shows at these lengths."""
GROUPED: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 257,
    "rope_theta": 5000.0,
}
ROUTED: dict[str, Any] = {"n_routed_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 80}
LATENT: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "vocab_size": 257,
    "rope_theta": 5000.0,
    "rope_scaling": YARN,
    "intermediate_size": 80,
}

FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            **GROUPED,
            "num_hidden_layers": 5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mixtral": ("mixtral", {**GROUPED, "num_hidden_layers": 5, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "glm": ("glm4_moe", {**GROUPED, **ROUTED, "num_hidden_layers": 7, "first_k_dense_replace": 2, "use_qk_norm": True}),
    "glm-air": (
        "glm4_moe",
        {**GROUPED, **ROUTED, "num_hidden_layers": 5, "use_qk_norm": False, "routed_scaling_factor": 1.7},
    ),
    "deepseek": (
        "deepseek_v3",
        {**LATENT, "num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 8},
    ),
    "kimi": (
        "deepseek_v3",
        {
            **LATENT,
            "num_hidden_layers": 7,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **GROUPED,
            "num_hidden_layers": 5,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "swiglu_limit": 0.8,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ),
    "minimax": (
        "minimax_m2",
        {**GROUPED, "num_hidden_layers": 5, "rotary_dim": 4, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
}
