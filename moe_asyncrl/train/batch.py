"""Samples -> one packed micro-batch of tensors on one rank.

Inputs are tokens [0, T-1) and labels tokens [1, T) of each sample, laid end to end. What belongs to the prediction of
token i + 1 (its weight, advantage, sampler's log-probability) therefore stands at position i, and so does routing
row i. Padding is one more sequence at the end: it can neither be attended to by real tokens nor shift them. Under
context parallelism each sequence is padded at its own end, too, and a rank has its zigzag parts of everything
(`moe_asyncrl.train.rank_positions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.replay.masks import Support, packed
from moe_asyncrl.replay.rows import Owner, ReplayMismatch, owners_within, padding_rows
from moe_asyncrl.train.rank_positions import RankPositions, positions_of_rank

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
    """[rows, L, K], or of this rank's MoE layers alone; None where no row is known."""
    rows_at: npt.NDArray[np.int64] | None = None
    """int64 [rows]: numbers of the rows that `experts` holds; None for all T - 1 in order."""
    known: npt.NDArray[np.bool_] | None = None
    """bool [T - 1]: rows that are known; None for all."""


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """What rows must look like: MoE layers of the whole model, experts of a layer, experts of a token."""

    layers: int
    experts: int
    top_k: int
    own: tuple[int, ...] | None = None
    """Numbers of the MoE layers that this rank has, rising; None for all."""

    @property
    def here(self) -> tuple[int, ...]:
        """`own`, spelled out."""
        return tuple(range(self.layers)) if self.own is None else self.own


@dataclass(kw_only=True)
class MicroBatch:
    """Tensors of one rank's n packed positions, padding included, on the model's device (routing rows stay on the CPU).

    The r positions that this rank's routers see are `at.routed` of them: all, without tensor parallelism.
    """

    tokens: Tensor
    """int64 [1, n]"""
    labels: Tensor
    """int64 [1, n]"""
    positions: Tensor
    """int64 [1, n], counted from 0 in each sample."""
    offsets: Tensor
    """int32 [sequences + 1], where each sequence starts, over all context-parallel ranks together."""
    longest: int
    """Positions of the longest sequence, likewise."""
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
    padding: Tensor
    """bool [n]"""
    at: RankPositions
    """Which positions these are."""
    owners: tuple[Owner, ...]
    """Of the n positions, in order."""
    support: Support | None = None
    """Ids that the sampler kept at the n positions; None where it kept all, and off the last pipeline stage."""
    rows: Tensor | None = None
    """integer [r, this rank's MoE layers, K]"""
    known: Tensor | None = None
    """bool [r]"""
    old_logprobs: Tensor | None = None
    """float32 [n] under the weights at the start of the batch, where that takes a pass of its own."""
    reference_logprobs: Tensor | None = None
    """float32 [n] under the reference model, where there is one."""

    @property
    def length(self) -> int:
        """n"""
        return int(self.tokens.shape[1])

    @property
    def real(self) -> int:
        """Positions that are no padding."""
        return int(self.at.real.sum())

    @property
    def routed_owners(self) -> tuple[Owner, ...]:
        """Owners of the r positions that this rank's routers see."""
        return owners_within(self.owners, self.at.routed)

    @property
    def counted(self) -> Tensor:
        """bool [r], on the CPU: those of them that are no padding."""
        return torch.from_numpy(self.at.real[self.at.routed])


def make_micro_batch(
    samples: Sequence[Sample],
    *,
    layout: Layout | None = None,
    multiple: int = 1,
    router: RouterShape | None = None,
    device: torch.device | None = None,
    rank: int = 0,
    vocabulary: range | None = None,
) -> MicroBatch:
    """Pack samples. Without any it is a dummy of padding, which every rank needs to meet the others in collectives.

    Args:
        samples: in order.
        layout: how the model is spread; None for one rank.
        multiple: all positions of the micro-batch together are a multiple of it.
        router: given where routing rows are replayed.
        device: where the model is.
        rank: whose positions these are; without a layout for messages only.
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
    at = positions_of_rank(lengths, layout or Layout(), rank if layout else 0, multiple=multiple)
    # Place of each position in the samples' inputs laid end to end; padding reads the zero behind them.
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    place = np.where(at.real, starts[np.minimum(at.sequence, len(samples))] + at.position, starts[-1])
    tokens = _laid(np.int64, [s.tokens[:-1] for s in samples])[place]
    labels = _laid(np.int64, [s.tokens[1:] for s in samples])[place]
    trained = _laid(np.bool_, [s.trained[1:] for s in samples])[place]
    weight = np.asarray([*(s.weight for s in samples), 0.0], dtype=np.float32)
    advantage = np.asarray([*(s.advantage for s in samples), 0.0], dtype=np.float32)
    each = np.where(at.real, at.sequence, len(samples))
    logprobs = _laid(
        np.float32,
        [np.zeros(len(s.tokens) - 1) if s.sampler_logprobs is None else s.sampler_logprobs[1:] for s in samples],
    )[place]
    rows, known = (None, None) if router is None else _routing(samples, at, router, rank)

    support = None
    if vocabulary is not None and any(s.mask is not None for s in samples):
        support = packed([s.mask for s in samples], lengths, sum(lengths) + 1)
        support = support.at(torch.from_numpy(place)).within(vocabulary)
        support = support if device is None else support.to(device)

    def there(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return MicroBatch(
        tokens=there(tokens)[None],
        labels=there(labels)[None],
        positions=there(at.position)[None],
        offsets=there(np.concatenate([[0], np.cumsum(at.sizes)]).astype(np.int32)),
        longest=int(at.sizes.max()),
        trained=there(trained),
        weights=there(np.where(trained, weight[each], np.float32(0))),
        advantages=there(advantage[each]),
        sampler_logprobs=there(np.where(trained, logprobs, np.float32(0))),
        samples=len(samples),
        padding=there(~at.real),
        at=at,
        owners=_owners(samples, at),
        support=support,
        rows=rows,
        known=known,
    )


def _laid(dtype: npt.DTypeLike, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts end to end, and one zero behind them."""
    return np.concatenate([*(part.astype(dtype, copy=False) for part in parts), np.zeros(1, dtype=dtype)])


def _owners(samples: Sequence[Sample], at: RankPositions) -> tuple[Owner, ...]:
    """Runs of consecutive positions of one sample, or of padding."""
    new = np.ones(at.length, dtype=np.bool_)
    same = (at.sequence[1:] == at.sequence[:-1]) & (at.real[1:] == at.real[:-1])
    new[1:] = ~(same & (at.position[1:] == at.position[:-1] + 1))
    starts = np.flatnonzero(new).tolist()
    return tuple(
        Owner(samples[at.sequence[a]].name if at.real[a] else PADDING, a, b, int(at.position[a]))
        for a, b in pairwise([*starts, at.length])
    )


def _routing(samples: Sequence[Sample], at: RankPositions, router: RouterShape, rank: int) -> tuple[Tensor, Tensor]:
    """Rows and known flags of the positions that this rank's routers see."""
    sequence, position, real = at.sequence[at.routed], at.position[at.routed], at.real[at.routed]
    rows = np.zeros((len(real), len(router.here), router.top_k), dtype=np.uint16)
    known = np.zeros(len(real), dtype=np.bool_)
    bounds = np.searchsorted(sequence, np.arange(len(samples) + 1))
    for i, s in enumerate(samples):
        if s.experts is None:
            continue
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        on = np.flatnonzero(real[part]) + part.start
        wanted = position[on]
        rows[on] = _rows_of(s, wanted, router, rank)
        known[on] = True if s.known is None else s.known[wanted]
    rows[~real] = padding_rows(int((~real).sum()), len(router.here), router.top_k, router.experts).numpy()
    known[~real] = True
    # PyTorch has few operations on uint16, and int32 holds every expert.
    return torch.from_numpy(rows.astype(np.int32)), torch.from_numpy(known)


def _rows_of(s: Sample, wanted: npt.NDArray[np.int64], router: RouterShape, rank: int) -> np.ndarray:
    """Rows `wanted` of a sample in this rank's layers, [wanted, layers, K]."""
    assert s.experts is not None
    n = len(s.tokens) - 1 if s.rows_at is None else len(s.rows_at)
    shape = s.experts.shape
    here = len(router.here)
    if shape not in ((n, router.layers, router.top_k), (n, here, router.top_k)):
        raise ReplayMismatch(
            f"trajectory {s.name}, rank {rank}: routing rows {list(shape)} for {n} input tokens, "
            f"{router.layers} MoE layers and {router.top_k} experts a token"
        )
    found = wanted
    if s.rows_at is not None:
        order = np.argsort(s.rows_at)
        found = order[np.searchsorted(s.rows_at, wanted, sorter=order).clip(max=max(0, n - 1))] if n else wanted
        missing = wanted[s.rows_at[found] != wanted] if n else wanted
        if len(missing):
            raise ReplayMismatch(
                f"trajectory {s.name}, row {missing[0]}, MoE layers {list(router.here)}, rank {rank}: the row was not "
                "sent to this rank"
            )
    layers = list(router.here) if shape[1] == router.layers and router.own is not None else slice(None)
    return s.experts[found][:, layers]
