"""What stands around SGLang's `torch_native` attention backend: the padded batches of `cpu_attention`, and sinks.

Cross attention and single sequences that alone exceed the bound on the padding go to the original loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_asyncrl.engine.plugin.cpu_attention import Plan, attend, make_plan


def forget_plan(result: Any, backend: Any, *args: Any, **kwargs: Any) -> None:
    """After `init_forward_metadata`, once per forward pass: the next layer makes a new plan."""
    backend.moe_asyncrl_plans = {}
    backend.moe_asyncrl_sinks = None


def take_sinks(original: Callable[..., torch.Tensor], backend: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Around `forward_decode` and `forward_extend`, which know no sinks: keep them for the loops, which are ours."""
    backend.moe_asyncrl_sinks = kwargs.pop("sinks", None)
    return original(backend, *args, **kwargs)


def claim_sinks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `handle_model_specific_adjustments`, which refuses models with sinks and windows by the backend's name.

    While it looks, ours has the name of one that knows them.
    """
    from sglang.srt.arg_groups import model_hook

    look_up = model_hook.attention_backends_of
    names = {"torch_native": "intel_amx"}
    model_hook.attention_backends_of = lambda config: tuple(names.get(n, n) for n in look_up(config))
    try:
        return original(*args, **kwargs)
    finally:
        model_hook.attention_backends_of = look_up


def one_pool(*args: Any, **kwargs: Any) -> bool:
    """In place of `is_hybrid_swa_model`: every layer keeps its keys in one pool, and windows are masks."""
    return False


def _plan(
    backend: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    kv_lengths: torch.Tensor,
    query_lengths: torch.Tensor | None,
    window: int | None,
) -> Plan:
    """One plan serves all layers of a forward pass that are alike in what it depends on."""
    width = max(query.shape[1] * query.shape[2], keys.shape[1] * keys.shape[2])
    # The original loops have no sinks: nothing may be left to them.
    sinks = 0 if backend.moe_asyncrl_sinks is None else query.shape[1]
    key = (width, query.dtype, query_lengths is None, window, sinks)
    plans: dict[Any, Plan] = backend.moe_asyncrl_plans
    if key not in plans:
        plans[key] = make_plan(
            table, requests, kv_lengths, query_lengths, width, query.dtype, window=window, sink_heads=sinks
        )
    return plans[key]


def decode(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    **rest: Any,
) -> torch.Tensor:
    """One new token per sequence. Arguments as in SGLang's `_run_sdpa_forward_decode`."""
    if encoder_lens is not None or rest.get("is_cross_attn"):
        return original(
            self,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            encoder_lens,
            scaling=scaling,
            **rest,
        )
    plan = _plan(self, query, k_cache, req_to_token, req_pool_indices, seq_lens, None, rest.get("sliding_window_size"))
    for batch in plan.batches:
        attend(batch, query, k_cache, v_cache, output, scaling, self.moe_asyncrl_sinks)
    for i in plan.alone:
        one = slice(i, i + 1)
        # The original returns what it was given, filled in; a slice of the output is a view of it.
        original(
            self, query[one], output[one], k_cache, v_cache, req_to_token, req_pool_indices[one], seq_lens[one],
            scaling=scaling, **rest,
        )  # fmt: skip
    return output


def extend(
    original: Callable[..., torch.Tensor],
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    causal: bool = False,
    **rest: Any,
) -> torch.Tensor:
    """Several new tokens per sequence behind a cached prefix. Arguments as in SGLang's `_run_sdpa_forward_extend`."""
    special = encoder_lens is not None or rest.get("is_cross_attn")
    if special or not causal:
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling=scaling, causal=causal, **rest,
        )  # fmt: skip
    plan = _plan(
        self, query, k_cache, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, rest.get("sliding_window_size")
    )
    for batch in plan.batches:
        attend(batch, query, k_cache, v_cache, output, scaling, self.moe_asyncrl_sinks)
    for i in plan.alone:
        one, rows = slice(i, i + 1), slice(plan.starts[i], plan.starts[i + 1])
        original(
            self, query[rows], output[rows], k_cache, v_cache, req_to_token, req_pool_indices[one], seq_lens[one],
            extend_prefix_lens[one], extend_seq_lens[one], scaling=scaling, causal=causal, **rest,
        )  # fmt: skip
    return output
