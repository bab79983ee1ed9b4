"""Attention against a softmax written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_patches.packed_rope import packed_positions
from tests.train.parity_jobs import packed
from tests.train.sharded import relative

LENGTHS = (5, 150, 1, 33, 36, 140, 7)


def attention(heads: int = 4, window: int | None = None, sinks: bool = False) -> Any:
    """The portable attention over the current context-parallel group, its sinks `sinks_of(heads)`."""
    from moe_asyncrl.train.attention import PortableAttention

    config: Any = SimpleNamespace(
        attention_dropout=0.0,
        num_attention_heads=heads,
        params_dtype=torch.float32,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=None,
        softmax_type="learnable" if sinks else "vanilla",
    )
    core = PortableAttention(config, 1, None, "self")
    if sinks:
        core.softmax_offset.data.copy_(sinks_of(heads))
    return core


def sinks_of(heads: int) -> torch.Tensor:
    """A logit for each head, float64."""
    return torch.linspace(-1.0, 2.0, heads, dtype=torch.float64)


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    ahead: int = 0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v in each sequence, each token seeing `ahead` tokens too many.

    With a window a token sees so many tokens, itself included; with sinks each softmax has one more logit.
    """
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(ahead)
        if window is not None:
            seen &= torch.ones_like(seen).triu(1 - window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(parts)


def drawn(tokens: int, shape: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """Query, key, value and an output gradient, float64, for (heads, kv heads, d of keys, d of values)."""
    heads, kv_heads, d, dv = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [(heads, d), (kv_heads, d), (kv_heads, dv), (heads, dv)]
    return [torch.randn(tokens, *size, generator=generator, dtype=torch.float64) for size in sizes]


def with_gradients(attend: Any, inputs: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """The output and the three input gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def packed_against_float64(
    shape: tuple[int, int, int, int], window: int | None = None, sinks: bool = False
) -> dict[str, float]:
    """Worst relative deviation of output and gradients; that of a planted error; the number of batches."""
    exact_sinks = sinks_of(shape[0]).requires_grad_() if sinks else None
    *inputs, gradient = drawn(sum(LENGTHS), shape)
    packing = packed(LENGTHS)
    core = attention(shape[0], window, sinks)
    found = with_gradients(
        lambda q, k, v: core(q, k, v, packed_seq_params=packing), [x.float() for x in inputs], gradient.float()
    )
    exact = with_gradients(lambda *x: written_out(*x, LENGTHS, window=window, sinks=exact_sinks), inputs, gradient)
    if exact_sinks is not None:
        output = core(*(x.float() for x in inputs), packed_seq_params=packing)
        found += torch.autograd.grad(output, core.softmax_offset, gradient.float())
        output = written_out(*inputs, LENGTHS, window=window, sinks=exact_sinks)
        exact += torch.autograd.grad(output, exact_sinks, gradient)
    wrong = with_gradients(lambda *x: written_out(*x, LENGTHS, ahead=1), inputs, gradient)
    (plan,) = packing.portable_batches.values()
    return {
        "worst": max(map(relative, found, exact)),
        "planted": min(map(relative, wrong, exact)),
        "batches": len(plan.batches),
    }


def spread_over_context(packing: str, window: int | None = None, sinks: bool = False) -> float:
    """Worst relative deviation of this rank's part of output and gradients from one rank's."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    lengths = (8, 120, 4, 36, 140) if packing == "packed" else (64,)
    *inputs, gradient = drawn(sum(lengths), (4, 2, 16, 16))
    offsets = packed(lengths).cu_seqlens_q
    own = torch.repeat_interleave(offsets[:-1], offsets.diff() // size) + packed_positions(offsets, rank, size)
    core = attention(4, window, sinks)
    exact_sinks = sinks_of(4) if sinks else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if packing == "packed":
            return core(q, k, v, packed_seq_params=packed(lengths))
        return core(q[:, None], k[:, None], v[:, None]).view_as(q)

    found = with_gradients(attend, [x[own].float() for x in inputs], gradient[own].float())
    exact = with_gradients(lambda *x: written_out(*x, lengths, window=window, sinks=exact_sinks), inputs, gradient)
    return max(relative(a, b[own]) for a, b in zip(found, exact, strict=True))
