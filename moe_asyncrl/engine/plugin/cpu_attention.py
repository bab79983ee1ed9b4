"""The attention of a CPU engine: sequences of similar length in one padded batch, with a bound on the padding.

Keys and values may differ in width. Sliding windows are masks, and a sink (gpt-oss: a learned logit of each head that
takes part in the softmax and adds nothing) is one more key of zeros whose mask is the sink.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_ELEMENTS = 1 << 24
"""Bound on the largest temporary of one padded batch (keys, queries or mask), in elements: 64 MiB in float32."""
MERGE_TOKENS = 4096
"""Below so many padded tokens a batch may mix any lengths: a call costs more than the padding."""


def plan_groups(
    kv_lengths: Sequence[int],
    query_lengths: Sequence[int],
    width: int,
    max_elements: int = MAX_ELEMENTS,
    masks: int = 1,
) -> tuple[list[list[int]], list[int]]:
    """Split sequences into padded batches. `width` is heads x head size, the elements that one padded token takes.

    `masks`: of a sequence, one or one a head.

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
        if max(kv * width, query * width, query * kv * masks) > max_elements:
            alone.append(i)
            continue
        n, q = len(current) + 1, max(longest_query, query)
        fits = n * max(kv * width, q * width, q * kv * masks) <= max_elements
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
    window: int | None = None,
    sink_heads: int = 0,
) -> Plan:
    """table int [requests, context]: KV slots; kv_lengths, query_lengths int [n] (None: one query each, a decode step).

    `window`: a token looks back at most so many tokens, and at itself. `sink_heads`: heads that have a sink each; then
    a sequence that exceeds the bound alone has a batch of its own.
    """
    kv = [int(v) for v in kv_lengths.tolist()]
    q = [1] * len(kv) if query_lengths is None else [int(v) for v in query_lengths.tolist()]
    starts = [0]
    for length in q:
        starts.append(starts[-1] + length)
    groups, alone = plan_groups(kv, q, width, max_elements, sink_heads or 1)
    if sink_heads:
        groups, alone = [*groups, *([i] for i in alone)], []
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
            position = lengths[:, None] - 1
            idle = torch.zeros_like(position, dtype=torch.bool)
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
            idle = torch.arange(queries) >= counts[:, None]
        allowed = (column <= position[..., None]) & real[:, None]
        if window is not None:
            allowed &= column >= position[..., None] - window
        # A padded query looks at the first key, so that its softmax, which nobody reads, is not 0/0.
        allowed |= idle[..., None] & (column == 0)
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
    sinks: torch.Tensor | None = None,
) -> None:
    """Write attention of the batch's sequences into `output` [rows, Hq, Dv].

    query [rows, Hq, D]; keys [slots, Hkv, D]; values [slots, Hkv, Dv]; sinks [Hq].
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    shape = (batch.n, batch.keys, kv_heads, -1)
    k = keys.index_select(0, batch.slots).view(shape).transpose(1, 2).to(query.dtype)
    v = values.index_select(0, batch.slots).view(shape).transpose(1, 2).to(query.dtype)
    q = query if batch.rows is None else query[batch.rows]
    mask = batch.mask
    # With one query a sequence, the heads that share a key head stand as its queries: keys need no copy per head.
    grouped = (kv_heads, heads // kv_heads) if batch.places is None else (heads, 1)
    if sinks is not None:
        k, v, mask = _with_sinks(k, v, mask, sinks.to(q.dtype).view(1, *grouped, 1))
    if batch.places is None:
        q = q.reshape(batch.n, *grouped, q.shape[-1])
        result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).reshape(batch.n, heads, -1)
    else:
        padded = q.new_zeros(batch.n * batch.queries, heads, q.shape[-1])
        padded[batch.places] = q[: len(batch.places)]
        padded = padded.view(batch.n, batch.queries, heads, -1).transpose(1, 2)
        mixed = scaled_dot_product_attention(padded, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads)
        result = mixed.transpose(1, 2).reshape(batch.n * batch.queries, heads, -1)[batch.places]
    if batch.rows is None:
        output[: len(result)] = result
    else:
        output[batch.rows] = result


def _with_sinks(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One more key and value of zeros; every query sees it with the logit of its head. sinks [1, heads, queries, 1]."""
    k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
    shape = [max(a, b) for a, b in zip(mask.shape[:3], sinks.shape[:3], strict=True)]
    return k, v, torch.cat([mask.expand(*shape, -1), sinks.expand(*shape, 1)], -1)
