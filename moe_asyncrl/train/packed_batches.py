"""Packed sequences as a few padded batches of similar lengths, so that attention runs without a loop over sequences.

Tokens are moved once into the batches' order, with padding at the end of each sequence, and once back. Between, each
batch is a view of the moved tokens, and one attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

CALL_COST = 300_000
"""What one attention call costs beyond its work, in multiply-adds: measured on one CPU core, forward and backward."""
MAX_PADDED_TOKENS = 8192
"""Bound on rows * length of a batch, and so on what one call holds at a time. A longer sequence goes alone."""


@dataclass(frozen=True)
class Batch:
    """One attention call: `rows` sequences padded to `length`, a run of the moved tokens."""

    rows: int
    length: int
    query_positions: torch.Tensor | None = None
    """int64 [rows, length], only under context parallelism: without it, positions count up."""
    key_positions: torch.Tensor | None = None
    """int64 [rows, cp * length], as above."""


@dataclass(frozen=True)
class PackedBatches:
    """How the tokens of one packed micro-batch go through attention."""

    batches: tuple[Batch, ...]
    queries: torch.Tensor
    """Packed index of each moved query, int64 [sum of rows * length]; padding repeats a sequence's last token."""
    keys: torch.Tensor
    """The same for keys and values, into all context-parallel ranks' tokens one rank after the other."""
    order: torch.Tensor
    """Where each packed token stands among the moved ones, int64 [tokens]."""

    @classmethod
    def of(cls, packed: Any, width: int, cp_size: int, cp_rank: int, device: torch.device) -> PackedBatches:
        """The batches of Megatron-Core `PackedSeqParams`, made by its first layer and kept with it for the others."""
        kept: dict[tuple[int, int, int], PackedBatches] = packed.__dict__.setdefault("portable_batches", {})
        made = kept.get((width, cp_size, cp_rank))
        if made is None:
            offsets = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            lengths = offsets.diff().tolist()
            made = make_batches(lengths, width=width, cp_size=cp_size, cp_rank=cp_rank).to(device)
            kept[width, cp_size, cp_rank] = made
        return made

    def to(self, device: torch.device) -> PackedBatches:
        """The same with its tensors on `device`."""
        moved = [
            Batch(
                batch.rows,
                batch.length,
                None if batch.query_positions is None else batch.query_positions.to(device),
                None if batch.key_positions is None else batch.key_positions.to(device),
            )
            for batch in self.batches
        ]
        return PackedBatches(tuple(moved), self.queries.to(device), self.keys.to(device), self.order.to(device))


def group_by_length(
    lengths: Sequence[int], *, width: int, max_padded_tokens: int = MAX_PADDED_TOKENS
) -> list[list[int]]:
    """Numbers of the sequences, grouped so that a group's lengths are alike. Empty sequences are in no group.

    Taken from the longest to the shortest, a sequence joins the current group while padding it to the group's longest
    adds less work, `width` * (longest^2 - length^2) multiply-adds, than a call of its own would cost (`CALL_COST`),
    and while the group stays within `max_padded_tokens`. Every other sequence is in exactly one group.
    """
    groups: list[list[int]] = []
    longest = 0
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        alike = width * (longest**2 - lengths[number] ** 2) <= CALL_COST
        if groups and alike and (len(groups[-1]) + 1) * longest <= max_padded_tokens:
            groups[-1].append(number)
        else:
            groups.append([number])
            longest = lengths[number]
    return groups


def make_batches(
    lengths: Sequence[int],
    *,
    width: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    max_padded_tokens: int = MAX_PADDED_TOKENS,
) -> PackedBatches:
    """Batches for packed sequences of the given whole lengths; `width` is heads * head size.

    Under context parallelism a rank's queries are its zigzag parts of each sequence, and its keys are all ranks'
    parts gathered in rank order. Lengths must then be multiples of 2 * cp_size.

    Raises:
        ValueError: a length that context parallelism cannot split.
    """
    if cp_size > 1 and any(length % (2 * cp_size) for length in lengths):
        raise ValueError(f"each packed sequence must be a multiple of 2 * cp = {2 * cp_size} tokens: {list(lengths)}")
    own = [length // cp_size for length in lengths]
    starts = [0, *accumulate(own)]
    total = starts.pop()
    order = torch.empty(total, dtype=torch.int64)
    batches: list[Batch] = []
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    moved = 0
    for group in group_by_length(own, width=width * cp_size, max_padded_tokens=max_padded_tokens):
        start, count = (torch.tensor([values[number] for number in group])[:, None] for values in (starts, own))
        column = torch.arange(own[group[0]])
        index, real = start + torch.minimum(column, count - 1), column < count
        places = torch.arange(moved, moved + index.numel()).view_as(index)
        order[index[real]] = places[real]
        moved += index.numel()
        queries.append(index.flatten())
        if cp_size == 1:
            batches.append(Batch(len(group), own[group[0]]))
            continue
        keys.append(torch.cat([index + rank * total for rank in range(cp_size)], dim=1).flatten())
        # Padding is put after every real position, where causality hides it.
        behind = torch.tensor(index.shape[1] * cp_size)
        positions = [torch.where(real, zigzag(column, count, rank, cp_size), behind) for rank in range(cp_size)]
        batches.append(Batch(len(group), own[group[0]], positions[cp_rank], torch.cat(positions, dim=1)))
    flat = torch.cat(queries) if queries else order
    return PackedBatches(tuple(batches), flat, torch.cat(keys) if keys else flat, order)


def zigzag(column: torch.Tensor, count: torch.Tensor | int, rank: int, size: int) -> torch.Tensor:
    """Position in the whole sequence of token `column` of the `count` that a context-parallel rank holds of it.

    The sequence is cut into 2 * size parts; a rank holds part `rank` and its mirror image (Megatron-Core's order).
    """
    half = count // 2
    return torch.where(column < half, rank * half + column, (2 * size - rank - 2) * half + column)
