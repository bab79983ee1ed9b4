"""Fields of a config that families read alike."""

from __future__ import annotations

from typing import Any

from moe_asyncrl.models.features import RouterSpec
from moe_asyncrl.models.hf_fields import HfFields


def sizes(fields: HfFields, *, context: int = 32768, eps: float = 1e-6) -> dict[str, Any]:
    """Sizes, tokens and types. `context` and `eps` are the family's defaults. Raises UserError for odd values."""
    vocab = fields.integer("vocab_size")
    pad = fields.token_ids("pad_token_id", vocab)
    return {
        "hidden_size": fields.integer("hidden_size"),
        "vocab_size": vocab,
        "max_position_embeddings": fields.integer("max_position_embeddings", default=context),
        "norm_eps": fields.number("rms_norm_eps", default=eps),
        "tie_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab),
        "pad_token_id": pad[0] if pad else None,
        "torch_dtype": fields.torch_dtype(),
    }


def grouped_queries(fields: HfFields, *, default_head_dim: int | None = None) -> dict[str, Any]:
    """Heads of grouped-query attention; without a default, a head's size follows from the hidden size.

    Raises UserError for values that do not fit together.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.fail(f"`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}")
    if default_head_dim is None and fields.config.get("head_dim") is None and hidden % heads:
        raise fields.fail(f"`head_dim` is missing and `hidden_size` {hidden} is not a multiple of {heads} heads")
    head_dim = fields.integer("head_dim", default=default_head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.fail(f"`head_dim` {head_dim} is odd: the rotary embedding turns pairs")
    return {"num_attention_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def dense(layers: int) -> dict[str, Any]:
    """The fields of a model without experts."""
    return {
        "num_layers": layers,
        "moe_intermediate_size": 0,
        "num_experts": 0,
        "experts_per_token": 0,
        "moe_layers": (False,) * layers,
        "norm_topk_prob": False,
    }


def experts(fields: HfFields, *names: str) -> dict[str, Any]:
    """Routed experts and how many a token has. `names`: spellings of the first."""
    found, chosen = fields.integer(*names), fields.integer("num_experts_per_tok")
    if chosen > found:
        raise fields.fail(f"`num_experts_per_tok` {chosen} is more than the {found} experts")
    return {"num_experts": found, "experts_per_token": chosen}


def experts_everywhere(fields: HfFields) -> dict[str, Any]:
    """Layers that all have experts, of the width that the config gives as its feed-forward's."""
    layers, width = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    return {
        "num_layers": layers,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "moe_layers": (True,) * layers,
        **experts(fields, "num_local_experts", "num_experts"),
    }


def leading_dense(fields: HfFields) -> dict[str, Any]:
    """Layers of which the first `first_k_dense_replace` are dense and all others have experts."""
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("first_k_dense_replace", minimum=0, default=0)
    if first >= layers:
        raise fields.fail(f"`first_k_dense_replace` {first} leaves no mixture-of-experts layer of {layers}")
    if fields.config.get("moe_layer_freq", 1) != 1:
        raise fields.fail(f"`moe_layer_freq` {fields.config['moe_layer_freq']} is not supported: only 1 is")
    return {"num_layers": layers, "moe_layers": tuple(layer >= first for layer in range(layers))}


def sigmoid_router(fields: HfFields) -> dict[str, Any]:
    """The router of DeepSeek-V3 and GLM-4.5: sigmoid scores with a bias for the choice, groups, a scale.

    Raises UserError for another way of scoring, or groups that do not fit.
    """
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.config.get(name, only) != only:
            raise fields.fail(f"`{name}` {fields.config[name]!r} is not supported: only {only!r} is")
    if not fields.boolean("norm_topk_prob", default=True):
        raise fields.fail("`norm_topk_prob` is false: sigmoid scores not divided by their sum are not supported")
    groups = fields.integer("n_group", default=1)
    chosen = fields.integer("topk_group", default=1)
    count = fields.integer("n_routed_experts")
    if count % groups or chosen > groups:
        raise fields.fail(f"{count} experts in `n_group` {groups} with `topk_group` {chosen} do not fit together")
    scale = fields.number("routed_scaling_factor", default=1.0)
    router = RouterSpec(
        scores="sigmoid",
        expert_bias=True,
        # With every group allowed there is no limit.
        groups=1 if chosen == groups else groups,
        groups_per_token=1 if chosen == groups else chosen,
        scale=scale,
    )
    return {"router": router, "norm_topk_prob": True}
