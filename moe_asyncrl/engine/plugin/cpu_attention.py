"""The attention of a CPU engine: sequences of similar length in one padded batch, with a bound on the padding.

Stands around the two per-sequence loops of SGLang's `torch_native` backend and gives the same values. Sliding windows,
cross attention and single sequences that alone exceed the bound go to the original loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_ELEMENTS = 1 << 24
"""Bound on the largest temporary of one padded batch (keys, queries or mask), in elements: 64 MiB in float32."""
MERGE_TOKENS = 4096
"""Below so many padded tokens a batch may mix any lengths: a call costs more than the padding."""


def plan_groups(
    kv_lengths: Sequence[int], query_lengths: Sequence[int], width: int, max_elements: int = MAX_ELEMENTS
) -> tuple[list[list[int]], list[int]]:
    """Split sequences into padded batches. `width` is heads x head size, the elements that one padded token takes.

    Returns (groups of sequence numbers, sequence numbers that exceed the bound alone). Every sequence stands exactly
    once. In a group the longest is at most twice the shortest (keys), unless the whole group has at most MERGE_TOKENS
    padded keys.
    """
    groups: list[list[int]] = []
    alone: list[int] = []
    current: list[int] = []
    shortest = longest_query = 0
    for i in sorted(range(len(kv_lengths)), key=lambda i: (kv_lengths[i], query_lengths[i])):
        kv, query = kv_lengths[i], query_lengths[i]
        if max(kv * width, query * width, query * kv) > max_elements:
            alone.append(i)
            continue
        n, q = len(current) + 1, max(longest_query, query)
        fits = n * max(kv * width, q * width, q * kv) <= max_elements
        if current and fits and (kv <= 2 * shortest or n * kv <= MERGE_TOKENS):
            current.append(i)
            longest_query = q
        else:
            current = [i]
            groups.append(current)
            shortest, longest_query = kv, query
    return groups, alone


@dataclasses.dataclass(frozen=True)
class Batch:
    """One padded batch: n sequences, at most M keys and Q queries each. The same for all layers of a forward pass."""

    slots: torch.Tensor
    """int64 [n * M]: where each key stands in the cache. Padding repeats the sequence's own first slot."""
    mask: torch.Tensor
    """[n, 1, Q, M] in the queries' dtype: 0 where a query may look, -inf elsewhere."""
    rows: torch.Tensor | None
    """int64 [tokens]: the queries of these sequences among all query rows; None when that is every row in order."""
    places: torch.Tensor | None
    """int64 [tokens]: where each stands in the padded [n * Q] queries; None when Q is 1."""
    n: int
    keys: int
    queries: int


@dataclasses.dataclass(frozen=True)
class Plan:
    batches: list[Batch]
    alone: list[int]
    starts: list[int]
    """First query row of each sequence."""


def make_plan(
    table: torch.Tensor,
    requests: torch.Tensor,
    kv_lengths: torch.Tensor,
    query_lengths: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
    max_elements: int = MAX_ELEMENTS,
) -> Plan:
    """table int [requests, context]:

    KV slots; kv_lengths, query_lengths int [n] (None: one query each, a decode step).
    """
    kv = [int(v) for v in kv_lengths.tolist()]
    q = [1] * len(kv) if query_lengths is None else [int(v) for v in query_lengths.tolist()]
    starts = [0]
    for length in q:
        starts.append(starts[-1] + length)
    groups, alone = plan_groups(kv, q, width, max_elements)
    whole = len(groups) == 1 and not alone
    batches = []
    for group in groups:
        members = None if whole else torch.tensor(group)
        lengths = torch.tensor([kv[i] for i in range(len(kv))] if whole else [kv[i] for i in group])
        request = (requests if members is None else requests[members]).long()
        keys = int(lengths.max())
        n = len(group)
        column = torch.arange(keys)
        real = column < lengths[:, None]
        slots = table[request, :keys].long()
        slots = torch.where(real, slots, slots[:, :1])
        if query_lengths is None:
            allowed = real[:, None]
            rows, places, queries = members, None, 1
        else:
            counts = torch.tensor(q if whole else [q[i] for i in group])
            queries = int(counts.max())
            sequence = torch.repeat_interleave(torch.arange(n), counts)
            offset = torch.arange(len(sequence)) - (torch.cumsum(counts, 0) - counts)[sequence]
            places = sequence * queries + offset
            first = torch.tensor([starts[i] for i in group]) if members is not None else None
            rows = None if first is None else first[sequence] + offset
            position = (lengths - counts)[:, None] + torch.arange(queries)
            # A padded query looks at the first key, so that its softmax, which nobody reads, is not 0/0.
            allowed = ((column <= position[..., None]) & real[:, None]) | (column == 0)
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))[:, None]
        batches.append(Batch(slots.reshape(-1), mask, rows, places, n, keys, queries))
    return Plan(batches, alone, starts)


def attend(
    batch: Batch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    scale: float | None,
) -> None:
    """Write attention of the batch's sequences into `output` [rows, Hq, Dv].

    query [rows, Hq, D]; keys, values [slots, Hkv, D].
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    shape = (batch.n, batch.keys, kv_heads, -1)
    k = keys.index_select(0, batch.slots).view(shape).transpose(1, 2).to(query.dtype)
    v = values.index_select(0, batch.slots).view(shape).transpose(1, 2).to(query.dtype)
    q = query if batch.rows is None else query[batch.rows]
    if batch.places is None:
        # One query a sequence: the heads that share a key head stand as its queries, so keys need no copy per head.
        q = q.reshape(batch.n, kv_heads, heads // kv_heads, q.shape[-1])
        result = scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, scale=scale).reshape(batch.n, heads, -1)
    else:
        padded = q.new_zeros(batch.n * batch.queries, heads, q.shape[-1])
        padded[batch.places] = q[: len(batch.places)]
        padded = padded.view(batch.n, batch.queries, heads, -1).transpose(1, 2)
        mixed = scaled_dot_product_attention(
            padded, k, v, attn_mask=batch.mask, scale=scale, enable_gqa=heads != kv_heads
        )
        result = mixed.transpose(1, 2).reshape(batch.n * batch.queries, heads, -1)[batch.places]
    if batch.rows is None:
        output[: len(result)] = result
    else:
        output[batch.rows] = result


def forget_plan(result: Any, backend: Any, *args: Any, **kwargs: Any) -> None:
    """After `init_forward_metadata`, once per forward pass: the next layer makes a new plan."""
    backend.moe_asyncrl_plan = None


def _plan(
    backend: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    kv_lengths: torch.Tensor,
    query_lengths: torch.Tensor | None,
) -> Plan:
    width = max(query.shape[1] * query.shape[2], keys.shape[1] * keys.shape[2])
    key = (width, query.dtype, query_lengths is None)
    known = getattr(backend, "moe_asyncrl_plan", None)
    if known is None or known[0] != key:
        known = (key, make_plan(table, requests, kv_lengths, query_lengths, width, query.dtype))
        backend.moe_asyncrl_plan = known
    plan: Plan = known[1]
    return plan


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
    if encoder_lens is not None or rest.get("sliding_window_size") is not None or rest.get("is_cross_attn"):
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
    plan = _plan(self, query, k_cache, req_to_token, req_pool_indices, seq_lens, None)
    for batch in plan.batches:
        attend(batch, query, k_cache, v_cache, output, scaling)
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
    special = encoder_lens is not None or rest.get("sliding_window_size") is not None or rest.get("is_cross_attn")
    if special or not causal:
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling=scaling, causal=causal, **rest,
        )  # fmt: skip
    plan = _plan(self, query, k_cache, req_to_token, req_pool_indices, seq_lens, extend_seq_lens)
    for batch in plan.batches:
        attend(batch, query, k_cache, v_cache, output, scaling)
    for i in plan.alone:
        one, rows = slice(i, i + 1), slice(plan.starts[i], plan.starts[i + 1])
        original(
            self, query[rows], output[rows], k_cache, v_cache, req_to_token, req_pool_indices[one], seq_lens[one],
            extend_prefix_lens[one], extend_seq_lens[one], scaling=scaling, causal=causal, **rest,
        )  # fmt: skip
    return output
