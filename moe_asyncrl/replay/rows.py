"""Routing rows of trajectories -> rows of a micro-batch on one rank. Pure functions.

Row i of a trajectory is the routing of its input token i, so T tokens have T - 1 rows: the trainer feeds tokens
[0, T-1) and reads the log-probability of token i + 1 at position i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_asyncrl.data.provenance import other_version
from moe_asyncrl.data.trajectory import RoutingRun
from moe_asyncrl.data.validate import known_rows


class ReplayMismatch(Exception):
    """A row does not fit its token, or was not used exactly once. Names trajectory, layer and rank."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Tokens [start, end) of a micro-batch are consecutive ones of a trajectory (or padding).

    A trajectory may own several such runs: a context-parallel rank holds two parts of each.
    """

    name: str
    start: int
    end: int
    first: int = 0
    """Number of the routing row that belongs to token `start`."""


def padding_rows(tokens: int, layers: int, top_k: int, num_experts: int) -> Tensor:
    """Rows for padding tokens: int64 [tokens, layers, top_k], distinct experts in each row, spread evenly over experts.

    Raises ValueError if a token would need more experts than there are.
    """
    if top_k > num_experts:
        raise ValueError(f"{top_k} experts per token out of {num_experts}")
    first = torch.arange(tokens).mul(top_k)[:, None, None]
    rows = (first + torch.arange(top_k)[None, None, :]) % num_experts
    return rows.expand(tokens, layers, top_k).contiguous()


def check_rows(
    rows: Tensor, known: Tensor, owners: Sequence[Owner], *, num_experts: int, layers: Sequence[int], rank: int
) -> None:
    """Raise `ReplayMismatch` for an expert out of range or twice in a row.

    `rows` int [tokens, L, K], `known` bool [tokens]; rows that are not known are not looked at. `layers` are the global
    numbers of the L MoE layers, for the message.
    """
    if rows.ndim != 3 or rows.shape[0] != known.shape[0] or rows.shape[1] != len(layers):
        raise ReplayMismatch(
            f"rank {rank}: replay rows have the shape {list(rows.shape)} for {known.shape[0]} tokens and "
            f"{len(layers)} MoE layers"
        )
    values = rows.to(torch.int64)
    outside = (values < 0) | (values >= num_experts)
    ordered = values.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    bad = (outside.any(-1) | twice) & known[:, None]
    if not bool(bad.any()):
        return
    token, layer = (int(i) for i in bad.nonzero()[0])
    what = "an expert twice" if bool(twice[token, layer]) else f"an expert outside [0, {num_experts})"
    raise ReplayMismatch(
        f"{name_of(owners, token)}, MoE layer {layers[layer]}, rank {rank}: row has {what}: "
        f"{values[token, layer].tolist()}"
    )


def name_of(owners: Sequence[Owner], token: int) -> str:
    """`trajectory X, row i` for a token of a micro-batch."""
    for o in owners:
        if o.start <= token < o.end:
            return f"trajectory {o.name}, row {o.first + token - o.start}"
    return f"token {token} of the micro-batch"


def owners_within(owners: Sequence[Owner], part: slice) -> tuple[Owner, ...]:
    """The owners of the tokens [part.start, part.stop), counted from the part's start."""
    return tuple(
        Owner(
            o.name,
            max(o.start, part.start) - part.start,
            min(o.end, part.stop) - part.start,
            o.first + max(0, part.start - o.start),
        )
        for o in owners
        if o.end > part.start and o.start < part.stop
    )


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Router rows: how many are known, and how many were routed by the weights that sampled their token."""

    rows: int
    known: int
    same_version: int

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.rows + other.rows, self.known + other.known, self.same_version + other.same_version)


def coverage(runs: Sequence[RoutingRun], loss_mask: np.ndarray, weight_version: np.ndarray) -> Coverage:
    """Count rows of one trajectory. `loss_mask` bool [T], `weight_version` int32 [T].

    Row i decides how token i + 1 was predicted; where the policy sampled that token, the row has the same version if
    the weights that routed it are the weights that sampled it. A row of the prompt before the first sampled token is
    compared with the first sampled token's version.
    """
    rows = len(loss_mask) - 1
    known = known_rows(runs, rows)
    other = other_version(runs, loss_mask, weight_version)
    return Coverage(rows, int(known.sum()), int((known & ~other).sum()))
