"""Log-probabilities of the labels, and entropy, from logits whose vocabulary is spread over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_asyncrl.replay.masks import Support
from moe_asyncrl.train.support import support_logprobs

ENTROPY_ELEMENTS = 2**24
"""Logits looked at together for the entropy: bounds its extra memory."""


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    support: Support | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """Log-probability at `temperature` of each position's label, in float32.

    Where the sampler truncated (`support`), it is renormalised over the ids that the sampler kept; elsewhere it is the
    log-softmax over the whole vocabulary. Padding columns of the vocabulary are already out of the way: the model's
    output layer sets them very low.

    Args:
        logits: [..., V / tp], this rank's part of the vocabulary, any float type.
        labels: int64 [...], global ids, the same on all tensor-parallel ranks.
        temperature: what the logits are divided by.
        support: kept ids of the flattened positions; None if nothing was truncated.
        wanted: bool, flat: with a support, positions outside are 0 instead of computed over the whole vocabulary.

    Returns:
        float32 [...], the same on all tensor-parallel ranks, differentiable.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if support is None:
        return -vocab_parallel_cross_entropy(_scaled(logits, temperature), labels)
    flat, targets = logits.flatten(0, -2), labels.flatten()
    group = parallel_state.get_tensor_model_parallel_group()
    found = support_logprobs(flat, targets, support, temperature=temperature, group=group)
    whole = ~support.truncated if wanted is None else ~support.truncated & wanted
    rest = whole.nonzero().flatten()
    if len(rest):
        over_all = -vocab_parallel_cross_entropy(_scaled(flat[rest], temperature), targets[rest])
        found = found.index_put((rest,), over_all)
    return found.view(labels.shape)


@torch.no_grad()
def token_entropy(logits: Tensor, *, temperature: float = 1.0, group: Any = None) -> Tensor:
    """Entropy in nats of each position's distribution at `temperature`; float [..., V / tp] -> float32 [...].

    `group` is the tensor-parallel group; None or a group of one rank has the whole vocabulary.
    """
    flat = logits.flatten(0, -2)
    rows = max(1, ENTROPY_ELEMENTS // flat.shape[1])
    shared = group is not None and group.size() > 1
    top = flat.amax(-1).float() / temperature
    if shared:
        torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=group)
    # With s = logit / T - top: entropy = log(sum exp s) - sum(s exp s) / sum exp s.
    sums = torch.empty((2, flat.shape[0]), dtype=torch.float32, device=flat.device)
    for at in range(0, flat.shape[0], rows):
        s = flat[at : at + rows].float() / temperature - top[at : at + rows, None]
        e = s.exp()
        torch.sum(e, -1, out=sums[0, at : at + rows])
        torch.sum(s.mul_(e), -1, out=sums[1, at : at + rows])
    if shared:
        torch.distributed.all_reduce(sums, group=group)
    return (sums[0].log() - sums[1] / sums[0]).view(logits.shape[:-1])


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy divided by the temperature. Always a copy: Megatron's cross entropy works in place."""
    copy = logits.float()
    return copy / temperature if copy is logits or temperature != 1.0 else copy
