"""Samples -> one packed micro-batch of tensors on one rank.

Inputs are tokens [0, T-1) and labels tokens [1, T) of each sample, laid end to end. What belongs to the prediction of
token i + 1 (its weight, advantage, sampler's log-probability) therefore stands at position i, and so does routing
row i. Padding is one more sequence at the end: it can neither be attended to by real tokens nor shift them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.replay.masks import Support, packed
from moe_asyncrl.replay.rows import Owner, ReplayMismatch, padding_rows

PADDING = "(padding)"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence of T >= 2 tokens and how it is trained."""

    name: str
    tokens: npt.NDArray[np.int32]
    """int32 [T]"""
    trained: npt.NDArray[np.bool_]
    """bool [T]: tokens that the loss looks at; never the first."""
    weight: float = 0.0
    """Of each trained token in the loss of the whole batch."""
    advantage: float = 0.0
    sampler_logprobs: npt.NDArray[np.float32] | None = None
    """float32 [T], read where trained: inside the mask where there is one; None without a sampler."""
    mask: SamplingMask | None = None
    """Ids that truncation kept, over the T tokens, checked; None where nothing was truncated."""
    experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None
    """[T - 1, L, K]; None where no row is known."""
    known: npt.NDArray[np.bool_] | None = None
    """bool [T - 1]: rows of `experts` that are known; None for all."""


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """What rows must look like: MoE layers of the whole model, experts of a layer, experts of a token."""

    layers: int
    experts: int
    top_k: int


@dataclass(kw_only=True)
class MicroBatch:
    """Tensors of n packed positions, padding included, on the model's device (routing rows stay on the CPU)."""

    tokens: Tensor
    """int64 [1, n]"""
    labels: Tensor
    """int64 [1, n]"""
    positions: Tensor
    """int64 [1, n], counted from 0 in each sample."""
    offsets: Tensor
    """int32 [sequences + 1], where each sequence starts."""
    longest: int
    trained: Tensor
    """bool [n]"""
    weights: Tensor
    """float32 [n], 0 where not trained."""
    advantages: Tensor
    """float32 [n]"""
    sampler_logprobs: Tensor
    """float32 [n], 0 where not trained."""
    samples: int
    """Real samples."""
    real: int
    """Positions that are not padding: the first of the n."""
    owners: tuple[Owner, ...]
    support: Support | None = None
    """Ids that the sampler kept at the n positions; None where it kept all, and off the last pipeline stage."""
    rows: Tensor | None = None
    """integer [n, L, K]"""
    known: Tensor | None = None
    """bool [n]"""
    old_logprobs: Tensor | None = None
    """float32 [n] under the weights at the start of the batch, where that takes a pass of its own."""
    reference_logprobs: Tensor | None = None
    """float32 [n] under the reference model, where there is one."""

    @property
    def length(self) -> int:
        """n"""
        return int(self.tokens.shape[1])


def padded_length(real: int, multiple: int) -> int:
    """Positions of a micro-batch with `real` of them used: the next multiple, and never none."""
    return max(multiple, -(-real // multiple) * multiple)


def make_micro_batch(
    samples: Sequence[Sample],
    *,
    multiple: int = 1,
    router: RouterShape | None = None,
    device: torch.device | None = None,
    rank: int = 0,
    vocabulary: range | None = None,
) -> MicroBatch:
    """Pack samples. Without any it is a dummy of padding, which every rank needs to meet the others in collectives.

    Args:
        samples: in order.
        multiple: n is a multiple of it (tensor parallelism splits positions evenly).
        router: given where routing rows are replayed.
        device: where the model is.
        rank: for messages.
        vocabulary: ids of this rank's logits; None off the last pipeline stage, where sampling masks are left out.

    Raises:
        ReplayMismatch: a sample's routing rows do not have the shape that its tokens and the model ask for.
        ValueError: a sample has fewer than 2 tokens, or arrays of another length.
    """
    for s in samples:
        if len(s.tokens) < 2 or len(s.trained) != len(s.tokens):
            raise ValueError(f"sample {s.name}: {len(s.tokens)} tokens, {len(s.trained)} flags")
        if s.sampler_logprobs is not None and len(s.sampler_logprobs) != len(s.tokens):
            raise ValueError(f"sample {s.name}: {len(s.tokens)} tokens, {len(s.sampler_logprobs)} log-probabilities")
    lengths = [len(s.tokens) - 1 for s in samples]
    real = sum(lengths)
    total = padded_length(real, multiple)
    if total > real:
        lengths.append(total - real)
    sizes = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])

    tokens = _laid(total, np.int64, [s.tokens[:-1] for s in samples])
    labels = _laid(total, np.int64, [s.tokens[1:] for s in samples])
    trained = _laid(total, np.bool_, [s.trained[1:] for s in samples])
    each = np.repeat(np.arange(len(sizes)), sizes)
    weight = np.zeros(len(sizes), dtype=np.float32)
    weight[: len(samples)] = [s.weight for s in samples]
    advantage = np.zeros(len(sizes), dtype=np.float32)
    advantage[: len(samples)] = [s.advantage for s in samples]
    logprobs = _laid(
        total,
        np.float32,
        [np.zeros(len(s.tokens) - 1) if s.sampler_logprobs is None else s.sampler_logprobs[1:] for s in samples],
    )
    owners = tuple(
        Owner(samples[i].name if i < len(samples) else PADDING, int(offsets[i]), int(offsets[i + 1]))
        for i in range(len(sizes))
    )
    rows, known = (None, None) if router is None else _routing(samples, total, real, router, rank)

    support = None
    if vocabulary is not None and any(s.mask is not None for s in samples):
        support = packed([s.mask for s in samples], [len(s.tokens) - 1 for s in samples], total).within(vocabulary)
        support = support if device is None else support.to(device)

    def there(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return MicroBatch(
        tokens=there(tokens)[None],
        labels=there(labels)[None],
        positions=there(np.arange(total) - np.repeat(offsets[:-1], sizes))[None],
        offsets=there(offsets.astype(np.int32)),
        longest=int(sizes.max()),
        trained=there(trained),
        weights=there(np.where(trained, weight[each], np.float32(0))),
        advantages=there(advantage[each]),
        sampler_logprobs=there(np.where(trained, logprobs, np.float32(0))),
        samples=len(samples),
        real=real,
        owners=owners,
        support=support,
        rows=rows,
        known=known,
    )


def _laid(total: int, dtype: npt.DTypeLike, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts end to end, zeros behind them."""
    out = np.zeros(total, dtype=dtype)
    if parts:
        flat = np.concatenate(parts)
        out[: len(flat)] = flat
    return out


def _routing(samples: Sequence[Sample], total: int, real: int, router: RouterShape, rank: int) -> tuple[Tensor, Tensor]:
    rows = np.zeros((total, router.layers, router.top_k), dtype=np.uint16)
    known = np.zeros(total, dtype=np.bool_)
    at = 0
    for s in samples:
        n = len(s.tokens) - 1
        if s.experts is not None:
            if s.experts.shape != (n, router.layers, router.top_k):
                raise ReplayMismatch(
                    f"trajectory {s.name}, rank {rank}: routing rows {list(s.experts.shape)} for {n} input tokens, "
                    f"{router.layers} MoE layers and {router.top_k} experts a token"
                )
            rows[at : at + n] = s.experts
            known[at : at + n] = True if s.known is None else s.known
        at += n
    if total > real:
        rows[real:] = padding_rows(total - real, router.layers, router.top_k, router.experts).numpy()
        known[real:] = True
    # PyTorch has few operations on uint16, and int32 holds every expert.
    return torch.from_numpy(rows.astype(np.int32)), torch.from_numpy(known)
