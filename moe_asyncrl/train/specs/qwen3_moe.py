"""Qwen3-MoE: Qwen3 with routed experts in some or all layers; no shared expert, no expert bias."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import qwen3


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the architecture fixes.

    The router's weights are softmax over all experts, of which the top k are kept. Divided by their sum
    (`norm_topk_prob`) they equal a softmax over the k chosen logits, which is Megatron-Core's default; undivided they
    are its `moe_router_pre_softmax`.

    Raises:
        UserError: one expert a token with divided weights, whose router would have no gradient.
    """
    if spec.experts_per_token == 1 and spec.norm_topk_prob:
        raise UserError(
            "experts_per_token is 1 with norm_topk_prob true: each weight is then exactly 1 and the router never "
            "learns; set norm_topk_prob to false"
        )
    return {
        **qwen3.config_fields(spec),
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_ffn_hidden_size": spec.moe_intermediate_size,
        "moe_layer_freq": [int(moe) for moe in spec.moe_layers],
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
