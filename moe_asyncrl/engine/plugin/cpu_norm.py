"""Norms that SGLang has for GPUs only, in torch."""

from __future__ import annotations

from typing import Any

import torch


def norm_over_heads(norms: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of queries and of keys over all heads together, of all tensor-parallel ranks (MiniMax-M2).

    Stands in place of `MiniMaxM2QKRMSNorm.forward`: `norms` is that object, q [T, Hq x D] and k [T, Hk x D] are this
    rank's heads.
    """
    squares = torch.stack([x.float().square().mean(-1) for x in (q, k)])
    if norms._world_size > 1:
        from sglang.srt.models.minimax_m2 import attn_tp_all_reduce

        squares = attn_tp_all_reduce(squares) / norms._world_size
    scales = torch.rsqrt(squares + norms._eps)[..., None]
    pairs = zip((q, k), scales, (norms._q_norm.weight, norms._k_norm.weight), strict=True)
    normed = [(x.float() * scale * weight.float()).to(x.dtype) for x, scale, weight in pairs]
    return normed[0], normed[1]
