"""Log-probabilities renormalised inside the sampler's mask, the vocabulary spread over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_asyncrl.replay.masks import Support


def support_logprobs(
    logits: Tensor, labels: Tensor, support: Support, *, temperature: float, group: Any = None
) -> Tensor:
    """logit[label] / T - logsumexp over the kept ids of logits / T, at truncated positions, in float32.

    The memory beyond the logits and their gradient is that of the kept ids: there is no [n, V] mask.

    Args:
        logits: [n, V / tp], this rank's part of the vocabulary (equal parts, in rank order), any float type.
        labels: int64 [n], global ids, among the kept ones; the same on all tensor-parallel ranks.
        support: kept ids, those of this rank's part alone.
        temperature: what the logits are divided by.
        group: the tensor-parallel group; None or a group of one rank has the whole vocabulary.

    Returns:
        float32 [n], the same on all tensor-parallel ranks; 0 where not truncated. Its gradient is right on each rank if
        all of them have the same loss, as everywhere in Megatron-Core's tensor parallelism.
    """
    shared = group is not None and group.size() > 1
    start = group.rank() * logits.shape[1] if shared else 0
    columns = support.ids.long() - start
    is_label = columns == torch.repeat_interleave(labels - start, support.counts)
    found: Tensor = _SupportLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, columns, is_label, support.counts, support.truncated, temperature, group if shared else None
    )
    return found


class _SupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        is_label: Tensor,
        counts: Tensor,
        truncated: Tensor,
        temperature: float,
        group: Any,
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        kept = logits[rows, columns].to(wide) / temperature
        top = torch.segment_reduce(kept, "max", lengths=counts, initial=torch.finfo(wide).min)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        kept -= top[rows]
        exps = kept.exp()
        sums = torch.stack(
            [
                torch.segment_reduce(exps, "sum", lengths=counts),
                torch.segment_reduce(torch.where(is_label, kept, 0.0), "sum", lengths=counts),
            ]
        )
        if group is not None:
            dist.all_reduce(sums, group=group)
        total = torch.where(truncated, sums[0], 1.0)
        ctx.save_for_backward(exps.div_(total[rows]), rows, columns, is_label)
        ctx.like, ctx.temperature = (logits.shape, logits.dtype), temperature
        return torch.where(truncated, sums[1] - total.log(), 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shares, rows, columns, is_label = ctx.saved_tensors
        shape, dtype = ctx.like
        (gradient,) = gradients
        each = (is_label.to(shares.dtype) - shares) * (gradient[rows] / ctx.temperature)
        out = torch.zeros(shape, dtype=dtype, device=shares.device)
        out[rows, columns] = each.to(dtype)  # an id stands once at a position
        return out, None, None, None, None, None, None
