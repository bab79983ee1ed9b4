"""What a spec's router says to Megatron-Core's: fields that MoE families share."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec


def expert_fields(spec: ModelSpec) -> dict[str, Any]:
    """Experts, shared expert, and the router without its way of scoring."""
    fields: dict[str, Any] = {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_ffn_hidden_size": spec.moe_intermediate_size,
        "moe_layer_freq": [int(moe) for moe in spec.moe_layers],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    if spec.shared_expert_size:
        fields["moe_shared_expert_intermediate_size"] = spec.shared_expert_size
    return fields


def softmax_fields(spec: ModelSpec) -> dict[str, Any]:
    """A softmax over all experts, of which the top k are kept.

    Divided by their sum (`norm_topk_prob`) the weights equal a softmax over the k chosen logits, which is
    Megatron-Core's default; undivided they are its `moe_router_pre_softmax`.

    Raises:
        UserError: one expert a token with divided weights, whose router would have no gradient.
    """
    if spec.experts_per_token == 1 and spec.norm_topk_prob:
        raise UserError(
            "experts_per_token is 1 with norm_topk_prob true: each weight is then exactly 1 and the router never "
            "learns; set norm_topk_prob to false"
        )
    return {"moe_router_pre_softmax": not spec.norm_topk_prob, "moe_router_score_function": "softmax"}


def sigmoid_fields(spec: ModelSpec) -> dict[str, Any]:
    """Sigmoid scores, a bias in the choice, groups, a scale. The bias is a weight like others: nothing balances it.

    Raises:
        UserError: weights that Megatron-Core would compute in another way.
    """
    router, chosen = spec.router, spec.experts_per_token
    if chosen == 1:
        raise UserError(f"{spec.family}: one expert a token with sigmoid scores divided by their sum never learns")
    if router.groups > 1 and chosen // router.groups_per_token != 2:
        # HF ranks groups by their two best experts, Megatron-Core by their best (k / groups of a token).
        raise UserError(
            f"{spec.family}: {chosen} experts a token from {router.groups_per_token} groups: Megatron-Core's groups "
            "are those of the checkpoint only with two experts a group"
        )
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": router.scale,
    }
    if router.groups > 1:
        fields |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.groups_per_token}
    return fields
