"""Packed sequences as a few padded batches of similar lengths, so that attention runs without a loop over sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_PADDED_TOKENS = 8192
"""Bound on rows * length of one batch: what one attention call may hold at a time. A longer sequence goes alone."""
MAX_WASTE = 0.25
"""A sequence joins a batch only if padding stays below this part of the batch's attention work."""
LAUNCH_TOKENS = 32
"""Sequences this short are always alike: one more call costs more than the padding."""


@dataclass(frozen=True)
class Batch:
    """One attention call over `rows` sequences padded to a common length."""

    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Rows of query, key and value in the packed tensors, int64 [rows, length] each; key and value alike."""
    real: torch.Tensor
    """Places of the real queries in the flattened [rows * length] result, int64."""
    query_positions: torch.Tensor | None = None
    """int64 [rows, length]; None where positions simply count up, without context parallelism."""
    key_positions: torch.Tensor | None = None


@dataclass(frozen=True)
class PackedBatches:
    """How the tokens of one packed micro-batch go through attention."""

    batches: tuple[Batch, ...]
    order: torch.Tensor
    """Where each packed token's result stands among the batches' results laid end to end, int64 [tokens]."""

    @classmethod
    def of(cls, packed: Any, cp_size: int, cp_rank: int, device: torch.device) -> PackedBatches:
        """The batches of Megatron-Core `PackedSeqParams`, made once and kept with it for the other layers."""
        made: PackedBatches | None = getattr(packed, "portable_batches", None)
        if made is None:
            offsets = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            bounds: list[int] = offsets.tolist()
            lengths = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
            made = make_batches(lengths, cp_size=cp_size, cp_rank=cp_rank, device=device)
            packed.portable_batches = made
        return made


def group_by_length(lengths: Sequence[int], max_padded_tokens: int = MAX_PADDED_TOKENS) -> list[list[int]]:
    """Numbers of the sequences, grouped so that a group's lengths are alike. Empty sequences are in no group.

    Sequences are taken from the longest to the shortest. One joins the current group if the group, padded to its
    longest member, stays within `max_padded_tokens` and if its own quadratic work is at least 1 - MAX_WASTE of a
    padded row's. Every sequence is in exactly one group.
    """
    groups: list[list[int]] = []
    longest = 0
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        length = lengths[number]
        alike = length**2 >= (1 - MAX_WASTE) * longest**2 or longest <= LAUNCH_TOKENS
        if groups and alike and (len(groups[-1]) + 1) * longest <= max_padded_tokens:
            groups[-1].append(number)
        else:
            groups.append([number])
            longest = length
    return groups


def make_batches(
    lengths: Sequence[int],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    device: torch.device | None = None,
    max_padded_tokens: int = MAX_PADDED_TOKENS,
) -> PackedBatches:
    """Batches for packed sequences of the given whole lengths.

    Under context parallelism a rank's queries are its zigzag parts of each sequence, and its keys are all ranks'
    parts gathered in rank order. Lengths must then be multiples of 2 * cp_size.

    Raises:
        ValueError: a length that context parallelism cannot split.
    """
    if cp_size > 1 and any(length % (2 * cp_size) for length in lengths):
        raise ValueError(f"each packed sequence must be a multiple of 2 * cp = {2 * cp_size} tokens: {list(lengths)}")
    own = [length // cp_size for length in lengths]
    starts = _exclusive_sums(own)
    total = sum(own)
    batches, placed = [], []
    for group in group_by_length(lengths, max_padded_tokens):
        first, count = _columns(starts, group), _columns(own, group)
        column = torch.arange(int(count.max()))
        query = first + torch.minimum(column, count - 1)
        real = column < count
        placed.append(query[real])
        if cp_size == 1:
            batch = Batch(indices=(query, query, query), real=_where(real))
        else:
            keys = torch.cat([query + rank * total for rank in range(cp_size)], dim=1)
            positions = [_zigzag(column, count, rank, cp_size) for rank in range(cp_size)]
            # a padded key stands after every real query, where causality hides it
            behind = torch.full_like(positions[0], int(count.max()) * cp_size)
            key_positions = torch.cat([torch.where(real, place, behind) for place in positions], dim=1)
            query_positions = torch.where(real, positions[cp_rank], behind)
            batch = Batch((query, keys, keys), _where(real), query_positions, key_positions)
        batches.append(batch)
    order = torch.empty(total, dtype=torch.int64)
    if placed:
        order[torch.cat(placed)] = torch.arange(total)
    moved = tuple(_moved(batch, device) for batch in batches)
    return PackedBatches(batches=moved, order=order.to(device))


def _exclusive_sums(sizes: Sequence[int]) -> list[int]:
    sums, total = [], 0
    for size in sizes:
        sums.append(total)
        total += size
    return sums


def _columns(values: Sequence[int], group: Sequence[int]) -> torch.Tensor:
    """The values of a group's members as an int64 column [rows, 1]."""
    return torch.tensor([values[number] for number in group])[:, None]


def _where(real: torch.Tensor) -> torch.Tensor:
    return real.flatten().nonzero()[:, 0]


def _zigzag(column: torch.Tensor, count: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    half = count // 2
    return torch.where(column < half, rank * half + column, (2 * size - rank - 2) * half + column)


def _moved(batch: Batch, device: torch.device | None) -> Batch:
    if device is None or device.type == "cpu":
        return batch
    query, key, value = (index.to(device) for index in batch.indices)
    places = [None if p is None else p.to(device) for p in (batch.query_positions, batch.key_positions)]
    return Batch((query, key, value), batch.real.to(device), *places)
