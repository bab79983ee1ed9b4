"""Which prompt each index of a mixture is: by weight, by seed, and by nothing else.

The endless order of prompts is cut into blocks of 65,536. In each block every source has the same number of places,
its quota: its share of the weights, rounded so that the quotas fill the block. The places of a block are a
permutation made from (seed, block). A source's places, in order, walk through the source epoch by epoch. So the
prompt of any index is known without the ones before it: a resumed run goes on from its cursor alone, and workers agree
without talking. Over whole blocks the frequencies are the quotas exactly; inside one they scatter as in drawing
without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.prompts import PromptOrder, permutation

BLOCK = 1 << 16
"""Indices in a block: shares are kept to one part in so many."""
_PLACES = 0xFFFF
"""Number of the permutation of places, beside those of the sources (at most 64)."""


class MixtureOrder:
    """index -> (epoch of its source, position in the sources laid end to end), the same in every process."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        """`shuffle` is about the order inside each source; the sources are mixed in any case.

        Raises ValueError for an empty source or a weight that is not above 0.
        """
        if len(sizes) != len(weights) or not sizes:
            raise ValueError(f"{len(sizes)} sizes and {len(weights)} weights")
        self._seed = seed
        self._quotas = quotas(weights, BLOCK)
        self._starts = [0, *accumulate(sizes)][:-1]
        # Each source has a key of its own (seeds have 31 bits); the first one's is the seed, as without a mixture.
        self._orders = [PromptOrder(n, seed=seed + (i << 32), shuffle=shuffle) for i, n in enumerate(sizes)]
        self._recent: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def at(self, index: int) -> tuple[int, int]:
        """(epoch, position) of prompt instance `index` >= 0."""
        if index < 0:
            raise IndexError(f"prompt instance {index}")
        if len(self._orders) == 1:
            return self._orders[0].at(index)
        block, slot = divmod(index, BLOCK)
        sources, ranks = self._block(block)
        source = int(sources[slot])
        epoch, position = self._orders[source].at(block * self._quotas[source] + int(ranks[slot]))
        return epoch, self._starts[source] + position

    def _block(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """int64 [BLOCK] twice: the source of each place, and how many places of that source come before it."""
        if block not in self._recent:
            while len(self._recent) >= 2:  # as with epochs, tickets reach back over the last boundary at most
                del self._recent[min(self._recent)]
            places = permutation(BLOCK, seed=self._seed + (_PLACES << 32), epoch=block)
            sources = np.repeat(np.arange(len(self._quotas)), self._quotas)[places]
            ranks = np.empty(BLOCK, dtype=np.int64)
            ranks[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(q) for q in self._quotas])
            self._recent[block] = sources, ranks
        return self._recent[block]


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """`total` places by weight, by largest remainders; at least one for each source.

    Raises ValueError for a weight that is not a number above 0, or more sources than places.
    """
    if any(not math.isfinite(w) or w <= 0 for w in weights):
        raise ValueError(f"weights must be above 0, found {list(weights)}")
    if len(weights) > total:
        raise ValueError(f"{len(weights)} sources for {total} places")
    whole = math.fsum(weights)
    exact = [w / whole * total for w in weights]
    found = [max(1, math.floor(x)) for x in exact]
    while sum(found) < total:
        i = max(range(len(exact)), key=lambda i: exact[i] - found[i])
        found[i] += 1
    while sum(found) > total:  # sources with less than one place took them
        i = max(range(len(exact)), key=lambda i: found[i] - exact[i] if found[i] > 1 else -math.inf)
        found[i] -= 1
    return found


def shares(limit: int, weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """How many of `limit` each source gives, by weight; what a small source cannot give, the others do."""
    limit = min(limit, sum(sizes))
    given = [0] * len(sizes)
    while (left := limit - sum(given)) > 0:
        still = [i for i in range(len(sizes)) if given[i] < sizes[i]]
        whole = math.fsum(weights[i] for i in still)
        exact = {i: left * weights[i] / whole for i in still}
        if all(math.floor(x) == 0 for x in exact.values()):
            given[max(still, key=lambda i: (exact[i], -i))] += 1
            continue
        for i in still:
            given[i] += min(sizes[i] - given[i], math.floor(exact[i]))
    return given
