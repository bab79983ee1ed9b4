"""`sgl_kernel` where the real one is absent: torch versions of what the plain CPU path calls by name.

Any other operator imports and raises when called. `torch.ops.sgl_kernel.convert_weight_packed` stays unregistered on
purpose: SGLang probes for it, and takes its own `forward_native` paths when it is missing.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.0.0+standin"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write KV slots into the request table: row `req_pool_indices[i]`, columns [start_offset[i], end_offset[i]).

    `out_cache_loc` holds the slots of all requests back to back; `req_to_token` (int32 [requests, pool_len]) is changed
    in place.
    """
    start = start_offset.long()
    length = end_offset.long() - start
    total = int(length.sum())
    row = torch.repeat_interleave(req_pool_indices.long(), length)
    first = torch.repeat_interleave(start - (torch.cumsum(length, 0) - length), length)
    req_to_token[row, first + torch.arange(total)] = out_cache_loc[:total].to(req_to_token.dtype)


class _Absent:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{self.__name__} has no CPU version here")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)
