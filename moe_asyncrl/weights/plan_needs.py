"""What each engine rank must get, worked out from the layouts alone: what a plan is checked against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.engine_shards import Held, Rectangle, held_by_engine
from moe_asyncrl.weights.plan import Mode
from moe_asyncrl.weights.plan_groups import Group, Kind, model_groups
from moe_asyncrl.weights.trainer_blocks import AXES, Ints, Small


@dataclass(frozen=True, slots=True)
class Needs:
    """N rectangles, ordered by rank, tensor and first row; those of one rank and tensor differ on the first axis."""

    rank: Ints
    """[N]"""
    tensor: Ints
    """[N]"""
    low: Small
    """[N, 3]"""
    high: Small
    """[N, 3]"""


def needs_of(spec: ModelSpec, engine: EngineLayout, mode: Mode) -> Needs:
    """Of the ranks of a server. In broadcast every rank needs the same: it stands there once, as that of rank 0."""
    model = model_groups(spec)
    if mode == "broadcast":
        shapes = np.array([[*t.shape, *[1] * (AXES - len(t.shape))] for t in model.tensors], np.int32)
        count = len(shapes)
        return Needs(np.zeros(count, np.int64), np.arange(count), np.zeros((count, AXES), np.int32), shapes)
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for kind, numbers in zip(model.kinds, model.of_kind(), strict=True):
        by_row: dict[int, list[Group]] = {}
        for number in numbers:
            group = model.groups[number]
            by_row.setdefault(engine.row(group.first_entry.layer or 0), []).append(group)
        for row, groups in by_row.items():
            for held in held_by_engine(spec, engine, kind, row):
                for column, value in zip(columns, _repeat(spec, engine, kind, row, groups, held), strict=True):
                    column.append(value)
    rank, tensor, low, high = (np.concatenate(column) for column in columns)
    order = np.lexsort((low[:, 0], tensor, rank))
    return Needs(rank[order], tensor[order], low[order], high[order])


def _repeat(
    spec: ModelSpec, engine: EngineLayout, kind: Kind, row: int, groups: list[Group], held: Held
) -> tuple[np.ndarray, ...]:
    """Columns of what some ranks keep, for all groups of a kind."""
    if kind.per_expert:
        ep_ranks = engine.ep_ranks(row, spec.num_experts)
        pairs = [
            (index, ep * engine.moe_tp + position)
            for index, group in enumerate(groups)
            for ep in ep_ranks[group.first_entry.expert or 0]
            for position in held.ranks
        ]
    else:
        pairs = [(index, rank) for index in range(len(groups)) for rank in held.ranks]
    group, rank = np.array(pairs, np.int64).T
    tensors = np.array([g.tensors for g in groups], np.int64)
    member = [number for number, _ in held.rectangles]
    return (
        np.repeat(rank, len(member)),
        tensors[group][:, member].ravel(),
        np.tile(_ends([r for _, r in held.rectangles], "start"), (len(pairs), 1)),
        np.tile(_ends([r for _, r in held.rectangles], "stop"), (len(pairs), 1)),
    )


def _ends(rectangles: list[Rectangle], which: str) -> Small:
    padded = [[*r, *[range(1)] * (AXES - len(r))] for r in rectangles]
    return np.array([[getattr(axis, which) for axis in r] for r in padded], np.int32)
