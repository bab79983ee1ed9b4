"""The expert layer of a CPU engine: tokens sorted by expert, one pair of matrix products per expert that has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def grouped_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts over tokens that each chose K of them.

    x [T, H]; weights float [T, K]; ids int [T, K], where a negative id is an expert of another rank and adds nothing;
    w13 [E, 2I, H] (gate above up); w2 [E, H, I]. Returns [T, H] in the dtype of x.
    """
    tokens, k = ids.shape
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=w13.shape[0] + 1).tolist()
    rows = x.index_select(0, torch.div(order, k, rounding_mode="floor"))
    out = x.new_zeros(tokens * k, x.shape[1]) if counts[0] else x.new_empty(tokens * k, x.shape[1])
    start = counts[0]
    pieces = []
    for expert, count in enumerate(counts[1:]):
        if count:
            gate, up = F.linear(rows[start : start + count], w13[expert]).chunk(2, -1)
            pieces.append(F.linear(F.silu(gate).mul_(up), w2[expert]))
            start += count
    if pieces:
        out[order[counts[0] :]] = torch.cat(pieces)
    return torch.bmm(weights.to(x.dtype)[:, None], out.view(tokens, k, -1))[:, 0]


def moe_forward(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk: Any, config: Any
) -> torch.Tensor:
    """Stands around SGLang's `moe_forward_native(layer, x, topk_output, moe_runner_config)`.

    Anything but plain SwiGLU goes to the original, which cannot skip experts of other ranks: then it is an error.
    """
    weights, ids = topk.topk_weights, topk.topk_ids
    plain = (
        config.activation == "silu"
        and config.gemm1_alpha is None
        and not config.apply_router_weight_on_input
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
    )
    if plain:
        return grouped_experts(x, weights, ids, layer.w13_weight, layer.w2_weight)
    if bool((ids < 0).any()):
        raise NotImplementedError(
            "expert parallelism on the CPU needs plain SwiGLU experts; this model's have biases, clamps or "
            f"activation {config.activation!r}: run the engine with ep=1"
        )
    return original(layer, x, topk, config)
