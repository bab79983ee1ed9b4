"""Fills buckets: group by group in export order, each address into a bucket of its own. Pure arithmetic.

An address is what may share a bucket: the receivers, the pipeline stage, and in the trainer the expert-parallel rank
(or none), so that one rank holds all or most of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import stage_of
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.engine_shards import Held, held_by_engine
from moe_asyncrl.weights.plan import Mode, Parts, Pieces
from moe_asyncrl.weights.plan_groups import ITEM_BYTES, Kind, model_groups
from moe_asyncrl.weights.plan_units import Unit, aligned, make_unit
from moe_asyncrl.weights.trainer_blocks import KindBlocks, expert_ranks, kind_blocks, trainer_blocks


@dataclass(frozen=True, slots=True)
class Address:
    """Whose bucket it is."""

    engines: int
    """Number of the engine layout; 0 in broadcast."""
    ranks: tuple[int, ...] | None
    """Ranks of each such engine; None: all of every engine."""
    stage: int
    ep: int
    """Expert-parallel rank of the trainer; -1: none."""


@dataclass(slots=True)
class Filled:
    """Buckets and what lies in them."""

    addresses: list[Address] = field(default_factory=list)
    """Of each bucket."""
    nbytes: list[int] = field(default_factory=list)
    """Of each bucket."""
    placed: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """By number of the unit: (group, first bucket, bytes in front of it there)."""
    units: list[Unit] = field(default_factory=list)
    _open: dict[Address, int] = field(default_factory=dict)

    def put(self, unit: int, group: int, address: Address, bucket_bytes: int) -> None:
        """Place what a group has for an address."""
        sizes = self.units[unit].chunk_bytes
        bucket = self._open.get(address)
        if len(sizes) > 1:
            # Its chunks follow each other, and nothing else lies in their buckets.
            bucket, start = len(self.nbytes), 0
            self.addresses += [address] * len(sizes)
            self.nbytes += sizes
            self._open.pop(address, None)
        else:
            start = 0 if bucket is None else aligned(self.nbytes[bucket])
            if bucket is None or start + sizes[0] > bucket_bytes:
                bucket, start = len(self.nbytes), 0
                self.addresses.append(address)
                self.nbytes.append(0)
                self._open[address] = bucket
            self.nbytes[bucket] = start + sizes[0]
        self.placed.setdefault(unit, []).append((group, bucket, start))


def fill_buckets(
    spec: ModelSpec,
    layout: Layout,
    engines: tuple[EngineLayout, ...],
    mode: Mode,
    dtype: str,
    bucket_bytes: int,
    rows: int = 1,
) -> tuple[Filled, Parts, Pieces]:
    """All parts and pieces of a plan. `engines`: the different layouts. `rows`: see `make_unit`."""
    model = model_groups(spec)
    filled = Filled()
    known: dict[tuple[int, int, int], list[tuple[int, Held]]] = {}
    ep_ranks: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    blocks = [kind_blocks(spec, layout, kind) for kind in model.kinds]

    def units(kind_number: int, engine: int, row: int) -> list[tuple[int, Held]]:
        """What the ranks of an engine get of a kind, with the number of its unit."""
        found = known.get((kind_number, engine, row))
        if found is None:
            kind = model.kinds[kind_number]
            held = (_everything(kind),) if mode == "broadcast" else held_by_engine(spec, engines[engine], kind, row)
            item_bytes = [ITEM_BYTES[t.dtype or dtype] for t in kind.tensors]
            found = []
            for some in held:
                filled.units.append(make_unit(some.rectangles, item_bytes, blocks[kind_number], bucket_bytes, rows))
                found.append((len(filled.units) - 1, some))
            known[kind_number, engine, row] = found
        return found

    for number, group in enumerate(model.groups):
        kind = model.kinds[group.kind]
        stage = stage_of(group.first_entry, spec, layout)[0]
        (ep,) = expert_ranks(spec, layout, kind, [group])
        if mode == "broadcast":
            for unit, _ in units(group.kind, 0, 0):
                filled.put(unit, number, Address(0, None, stage, ep), bucket_bytes)
            continue
        for engine, engine_layout in enumerate(engines):
            row = engine_layout.row(group.first_entry.layer or 0)
            if (engine, row) not in ep_ranks:
                ep_ranks[engine, row] = engine_layout.ep_ranks(row, spec.num_experts)
            own = ep_ranks[engine, row][group.first_entry.expert or 0] if kind.per_expert else ()
            for unit, held in units(group.kind, engine, row):
                for ranks in _ranks(engine_layout, kind, own, held):
                    filled.put(unit, number, Address(engine, ranks, stage, ep), bucket_bytes)
    parts, pieces = _tables(spec, layout, filled, blocks)
    return filled, parts, pieces


def _everything(kind: Kind) -> Held:
    return Held((), tuple((i, tuple(range(n) for n in t.shape)) for i, t in enumerate(kind.tensors)))


def _ranks(engine: EngineLayout, kind: Kind, ep_ranks: tuple[int, ...], held: Held) -> Iterator[tuple[int, ...]]:
    """Ranks that share a bucket. Copies of one expert do not: the next expert's copies lie elsewhere."""
    if not kind.per_expert:
        yield held.ranks
        return
    for ep in ep_ranks:
        for position in held.ranks:
            yield (ep * engine.moe_tp + position,)


def _tables(spec: ModelSpec, layout: Layout, filled: Filled, blocks: list[KindBlocks]) -> tuple[Parts, Pieces]:
    """The columns, from each unit repeated at each of its places."""
    model, first_block = model_groups(spec), trainer_blocks(spec, layout).first
    columns: list[list[np.ndarray]] = [[] for _ in range(7)]
    done = 0
    for number, places in filled.placed.items():
        unit = filled.units[number]
        group, bucket, start = np.array(places, np.int64).T
        tensors = np.array([model.groups[g].tensors for g in group.tolist()], np.int32)
        count = len(places)
        part_base = done + len(unit.member) * np.arange(count)
        done += len(unit.member) * count
        for column, value in zip(
            columns,
            (
                tensors[:, unit.member].ravel(),
                np.tile(unit.low, (count, 1)),
                np.tile(unit.high, (count, 1)),
                (bucket[:, None] + unit.chunk[None, :]).ravel().astype(np.int32),
                (start[:, None] + unit.offset[None, :]).ravel(),
                (part_base[:, None] + unit.piece_part[None, :]).ravel(),
                (first_block[group][:, None] + unit.piece_block[None, :]).ravel(),
            ),
            strict=True,
        ):
            column.append(value)
    tensor, low, high, bucket, offset, piece_part, piece_block = (np.concatenate(c) for c in columns)
    order = np.lexsort((offset, bucket))
    where = np.empty(len(order), np.int64)
    where[order] = np.arange(len(order))
    piece_part = where[piece_part]
    by_part = np.argsort(piece_part, kind="stable")
    parts = Parts(tensor[order], low[order], high[order], bucket[order], offset[order])
    return parts, Pieces(piece_part[by_part], piece_block[by_part])
