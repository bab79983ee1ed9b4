"""Which sequence goes into which micro-batch of which data-parallel rank. A pure function of the lengths.

Every rank computes the same packing from the headers alone, so nobody has to send it. Invariants:

- every sequence stands in exactly one micro-batch of one rank;
- a micro-batch holds at most `micro_batch_tokens` tokens, unless it is one sequence that is longer by itself;
- every rank has the same number of micro-batches, since expert-parallel ranks meet in each of them;
- no rank costs more than the mean of the ranks plus the costliest sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """`ranks[dp][micro_batch]` lists the numbers of the sequences; an empty micro-batch is a dummy."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def sequence_cost(length: int, crossover: int | None = None) -> float:
    """Relative cost of one sequence: its tokens, and the quadratic part of attention.

    `crossover` is the length at which attention costs as much as everything else; None leaves it out.
    """
    return float(length) if crossover is None else length * (1.0 + length / crossover)


def pack(
    lengths: Sequence[int],
    *,
    dp: int,
    micro_batch_tokens: int,
    crossover: int | None = None,
    multiple: int = 1,
) -> Packing:
    """Balanced micro-batches.

    Args:
        lengths: tokens of each sequence as the model sees it, at least 1 each.
        dp: data-parallel ranks.
        micro_batch_tokens: most tokens of a micro-batch.
        crossover: see `sequence_cost`.
        multiple: the number of micro-batches is a multiple of it (pipelines of virtual stages need that).

    Raises:
        ValueError: an argument is below 1.
    """
    if min(dp, micro_batch_tokens, multiple, *lengths) < 1:
        raise ValueError("lengths, dp, micro_batch_tokens and multiple must be at least 1")
    costs = [sequence_cost(n, crossover) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    shares = _spread(order, costs, dp)
    tight = [_first_fit(share, lengths, micro_batch_tokens) for share in shares]
    needed = max(1, *(len(bins) for bins in tight))
    count = -(-needed // multiple) * multiple
    return Packing(
        tuple(
            _even(share, bins, lengths, costs, micro_batch_tokens, count)
            for share, bins in zip(shares, tight, strict=True)
        )
    )


def _spread(order: Sequence[int], costs: Sequence[float], parts: int) -> list[list[int]]:
    """Longest processing time first: each sequence, costliest first, to the part that has the least so far."""
    heap = [(0.0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for i in order:
        load, part = heapq.heappop(heap)
        shares[part].append(i)
        heapq.heappush(heap, (load + costs[i], part))
    return shares


def _first_fit(share: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit in the given (falling) order; a sequence above the capacity is alone."""
    bins: list[list[int]] = []
    # Room of each bin as a maximum tree: finding the first that fits takes log(bins), and there may be thousands.
    size = 1 << max(0, len(share) - 1).bit_length()
    room = [0] * (2 * size)

    def put(at: int, value: int) -> None:
        at += size
        room[at] = value
        while at > 1:
            at //= 2
            room[at] = max(room[2 * at], room[2 * at + 1])

    for i in share:
        n = lengths[i]
        if room[1] >= n:
            at = 1
            while at < size:
                at = 2 * at if room[2 * at] >= n else 2 * at + 1
            number = at - size
            bins[number].append(i)
            put(number, room[at] - n)
        else:
            bins.append([i])
            put(len(bins) - 1, max(0, capacity - n))
    return bins


def _even(
    share: Sequence[int],
    tight: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    count: int,
) -> tuple[tuple[int, ...], ...]:
    """`count` micro-batches of like cost; the tight ones and dummies where evening out does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load, room = [0.0] * count, [capacity] * count
    heap = [(0.0, b) for b in range(count)]
    fits = True
    for i in share:
        n, passed = lengths[i], []
        while heap and not (room[heap[0][1]] >= n or not bins[heap[0][1]]):
            passed.append(heapq.heappop(heap))
        if not heap:
            fits = False
            break
        _, b = heapq.heappop(heap)
        bins[b].append(i)
        load[b] += costs[i]
        room[b] -= n
        for entry in (*passed, (load[b], b)):
            heapq.heappush(heap, entry)
    if not fits:
        bins = [*tight, *([] for _ in range(count - len(tight)))]
        load = [sum(costs[i] for i in b) for b in bins]
    # Costliest first on every rank: ranks meet in each micro-batch, so like should meet like.
    ranked = sorted(range(count), key=lambda b: (-load[b], b))
    return tuple(tuple(sorted(bins[b])) for b in ranked)
