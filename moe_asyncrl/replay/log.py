"""The routing log of one trajectory while it grows: rows of one request after another, by the tokens they share.

    request 1   p p p a a a            rows 0 1 2 3 4        (the last token has none yet)
    request 2   p p p a a a u u b b    rows         . 5 6 7 8   (asked for from row 5 on)
    request 3   p p p a X …            shares 4 tokens: rows 0 1 2 3 stay, what comes behind is its own

A row belongs to its token and to all tokens before it, so what two requests share is their common prefix of tokens, and
never a number of rows. A row that was recorded stays as it was recorded first (fault 25: a later reading of the same
token may be by other weights); a later request fills in only what is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.digest import Experts
from moe_asyncrl.data.trajectory import RoutingRun
from moe_asyncrl.replay.encoding import MISSING, expand, runs_of

Tokens = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one request brought: rows [start, T-1) of T tokens, prompt and answer; fewer if the engine had fewer."""

    tokens: Tokens
    """int32 [T]"""
    start: int
    experts: Experts
    """[n, L, K], n <= T - 1 - start"""
    runs: tuple[RoutingRun, ...]
    """Version and source of these n rows, counted from row 0 of the sequence."""


@dataclasses.dataclass(frozen=True)
class RoutingLog:
    """Rows of the tokens so far. A value: `extended` gives the next one."""

    tokens: Tokens
    """int32 [T]"""
    experts: Experts
    """[T - 1, L, K]; where a row is missing it holds the largest number of its type."""
    version: npt.NDArray[np.int32]
    """int32 [T - 1]: weights that routed the row, -1 where not known."""
    source: npt.NDArray[np.int8]
    """int8 [T - 1], places in `encoding.SOURCES`."""

    @classmethod
    def of(cls, reading: Reading) -> RoutingLog:
        """The log of a first request. Raises ValueError if the reading's parts do not fit."""
        _, layers, k = reading.experts.shape
        empty = cls(
            np.zeros(0, dtype=np.int32),
            np.zeros((0, layers, k), dtype=reading.experts.dtype),
            np.zeros(0, dtype=np.int32),
            np.zeros(0, dtype=np.int8),
        )
        return empty.extended(reading)

    @property
    def runs(self) -> tuple[RoutingRun, ...]:
        """Version and source of all rows."""
        return runs_of(self.version, self.source)

    def shared(self, tokens: Sequence[int] | Tokens) -> int:
        """Leading tokens that the log and these have in common."""
        other = np.asarray(tokens)
        n = min(len(self.tokens), len(other))
        differs = np.flatnonzero(self.tokens[:n] != other[:n])
        return int(differs[0]) if len(differs) else n

    def rows_from(self, prompt: Sequence[int] | Tokens) -> int:
        """First row that a request with this prompt has to bring: the first one not held for these tokens.

        It is SGLang's `routed_experts_start_len`.
        """
        held = min(self.shared(prompt), len(self.source))
        missing = np.flatnonzero(self.source[:held] == MISSING)
        return int(missing[0]) if len(missing) else held

    def extended(self, reading: Reading) -> RoutingLog:
        """The log of the reading's tokens: rows held for the shared prefix, and the reading's behind them.

        Rows that neither has are missing. Raises ValueError if the reading's parts do not fit each other or the log.
        """
        total, n = len(reading.tokens) - 1, len(reading.experts)
        if reading.start < 0 or reading.start + n > total or reading.experts.shape[1:] != self.experts.shape[1:]:
            raise ValueError(
                f"{n} routing rows {list(reading.experts.shape[1:])} from {reading.start} on for {total + 1} tokens"
            )
        at = reading.start
        for run in reading.runs:
            if run.start != at or run.end <= run.start:
                raise ValueError(f"the runs of {n} routing rows from {reading.start} on: {reading.runs}")
            at = run.end
        if at != reading.start + n:
            raise ValueError(f"the runs of {n} routing rows from {reading.start} on end at {at}")
        dtype = np.promote_types(self.experts.dtype, reading.experts.dtype)
        experts = np.full((total, *self.experts.shape[1:]), np.iinfo(dtype).max, dtype=dtype)
        version, source = np.full(total, -1, dtype=np.int32), np.full(total, MISSING, dtype=np.int8)
        new = slice(reading.start, reading.start + n)
        experts[new] = reading.experts
        version[new], source[new] = expand(reading.runs)
        held = min(self.shared(reading.tokens), len(self.source), total)
        keep = np.flatnonzero(self.source[:held] != MISSING)
        experts[keep], version[keep], source[keep] = self.experts[keep], self.version[keep], self.source[keep]
        return RoutingLog(np.asarray(reading.tokens, dtype=np.int32), experts, version, source)
