"""Who in the trainer holds which rectangle of which HF tensor, as columns of numbers.

The same facts as `models.shards.rank_shards`, turned round: for each block the ranks that hold it, for all blocks of a
model at once. A tensor has at most 3 axes; missing ones count as axes of size 1 at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from moe_asyncrl.models.algebra import shard_blocks
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import check_layout, stage_of
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.plan_groups import Group, Kind, model_groups

AXES = 3
Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]


class Holders:
    """Sets of ranks that hold the same: numbered, so that a column can name them.

    A set is a pipeline stage, an expert-parallel rank or none (dense), and a tensor-parallel index or none (all).
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        at = [layout.coordinates(rank) for rank in range(layout.world_size)]
        self._at = {axis: np.array([getattr(c, axis) for c in at]) for axis in ("pp", "tp", "ep", "etp")}
        self._parts = max(layout.tp, layout.etp) + 1
        self._known: dict[int, tuple[int, ...]] = {}

    def number(self, stage: Ints | int, ep: Ints | int, part: Ints | int) -> Ints | int:
        """The set of a stage, an ep rank (-1: dense) and a part (-1: whole)."""
        return (stage * (self._layout.ep + 1) + (ep + 1)) * self._parts + (part + 1)

    def ranks(self, holder: int) -> tuple[int, ...]:
        """Its ranks, ascending."""
        found = self._known.get(holder)
        if found is None:
            found = self._known[holder] = self._ranks(holder)
        return found

    def stage(self, holder: Ints | int) -> Ints | int:
        """Its pipeline stage."""
        return holder // (self._parts * (self._layout.ep + 1))

    def _ranks(self, holder: int) -> tuple[int, ...]:
        rest, part = divmod(holder, self._parts)
        stage, ep = divmod(rest, self._layout.ep + 1)
        part, ep = part - 1, ep - 1
        chosen = self._at["pp"] == stage
        if ep >= 0:
            chosen &= self._at["ep"] == ep
        if part >= 0:
            chosen &= self._at["tp" if ep < 0 else "etp"] == part
        return tuple(int(rank) for rank in np.flatnonzero(chosen))


@dataclass(frozen=True, slots=True)
class KindBlocks:
    """The blocks of one group of a kind, B of them."""

    member: Small
    """[B] which tensor of the group."""
    low: Small
    """[B, 3] first index along each axis."""
    high: Small
    """[B, 3] behind the last index."""
    step: Small
    """[B, 3] 1, or more where only every step-th index is in the block."""
    ep: Small
    """[B] ep rank that holds it; -1: dense, or the ep rank of the group's own expert."""
    part: Small
    """[B] tensor-parallel index on its grid; -1: replicated over it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """All blocks of a model under a layout, B of them. Blocks of one tensor are disjoint and cover it."""

    tensor: Small
    """[B]"""
    low: Small
    """[B, 3]"""
    high: Small
    """[B, 3]"""
    step: Small
    """[B, 3]"""
    holder: Ints
    """[B] number in `holders`."""
    first: Ints
    """[number of groups] the first block of each group; its blocks follow in the order of its kind's."""
    holders: Holders


def kind_blocks(spec: ModelSpec, layout: Layout, kind: Kind) -> KindBlocks:
    """The blocks of a kind, those of each shard of each of its Megatron parameters."""
    index = {tensor.name: i for i, tensor in enumerate(kind.tensors)}
    rows: list[tuple[int, list[range], int, int]] = []
    for entry in kind.entries:
        count = 1 if entry.shard_axis is None else layout.tp if entry.expert is None else layout.etp
        ep = -1
        if entry.expert is not None and not kind.per_expert:
            ep = entry.expert // (spec.num_experts // layout.ep)
        for shard in range(count):
            part = -1 if entry.shard_axis is None else shard
            for block in shard_blocks(entry.op, entry.shard_axis, shard, count):
                ranges = [*block.hf_ranges, *[range(1)] * (AXES - len(block.hf_ranges))]
                rows.append((index[block.hf.name], ranges, ep, part))

    def table(pick: str) -> Small:
        return np.array([[getattr(r, pick) for r in ranges] for _, ranges, _, _ in rows], np.int32).reshape(-1, AXES)

    return KindBlocks(
        member=np.array([row[0] for row in rows], np.int32),
        low=table("start"),
        high=table("stop"),
        step=table("step"),
        ep=np.array([row[2] for row in rows], np.int32),
        part=np.array([row[3] for row in rows], np.int32),
    )


@lru_cache(maxsize=2)
def trainer_blocks(spec: ModelSpec, layout: Layout) -> Blocks:
    """All blocks of a model. Raises UserError if the layout does not fit it."""
    check_layout(spec, layout)
    model = model_groups(spec)
    holders = Holders(layout)
    first = np.zeros(len(model.groups), np.int64)
    columns: dict[str, list[npt.NDArray[np.integer]]] = {n: [] for n in ("tensor", "low", "high", "step", "holder")}
    filled = 0
    for kind, numbers in zip(model.kinds, model.of_kind(), strict=True):
        own = kind_blocks(spec, layout, kind)
        groups = [model.groups[n] for n in numbers]
        size = len(own.member)
        first[numbers] = filled + size * np.arange(len(groups))
        filled += size * len(groups)
        tensors = np.array([g.tensors for g in groups], np.int32)
        stage = np.array([stage_of(g.first_entry, spec, layout)[0] for g in groups])
        own_ep = np.array(list(expert_ranks(spec, layout, kind, groups)))
        ep = np.where(own.ep[None, :] >= 0, own.ep[None, :], own_ep[:, None])
        columns["tensor"].append(tensors[:, own.member].ravel())
        columns["holder"].append(
            np.asarray(holders.number(stage[:, None], ep, own.part[None, :].astype(np.int64))).ravel()
        )
        for name in ("low", "high", "step"):
            columns[name].append(np.tile(getattr(own, name), (len(groups), 1)))
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return Blocks(**joined, first=first, holders=holders)


def expert_ranks(spec: ModelSpec, layout: Layout, kind: Kind, groups: list[Group]) -> Iterator[int]:
    """The ep rank of each group's own expert; -1 where the kind is not of single experts."""
    for group in groups:
        expert = group.first_entry.expert if kind.per_expert else None
        yield -1 if expert is None else expert // (spec.num_experts // layout.ep)
