"""Which rank sends which part of which HF tensor to the collecting rank, bucket by bucket. Pure arithmetic.

A bucket is one flat buffer that holds whole HF tensors of one type back to back, in export order. What a rank owns of
it falls into messages: a run of elements that are adjacent in the buffer is received in place; what is not adjacent
there (columns of a row-parallel matrix under tensor parallelism, every second row) goes through a staging buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from moe_asyncrl.models.algebra import Block, HfTensor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import Entry, parameter_map
from moe_asyncrl.models.shards import Shard, check_layout, entry_owners, stage_of
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.fuse import fused_group


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of one shard, and where its HF tensor starts in the bucket (in elements)."""

    shard: Shard
    block: Block
    tensor_start: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends in one go: its pieces back to back, `numel` elements."""

    owner: int
    pieces: tuple[Piece, ...]
    numel: int
    start: int | None
    """Where the elements lie in the bucket, if they lie there in one run; None: each piece is placed by itself."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The tensors of one bucket, in order, and the messages that fill it."""

    tensors: tuple[HfTensor, ...]
    messages: tuple[Message, ...]
    numel: int
    dtype: str | None
    """The type that its tensors are stored in whatever the model's is; None: the model's."""

    @property
    def names(self) -> str:
        """For error messages: the first and the last tensor."""
        first, last = self.tensors[0].name, self.tensors[-1].name
        return first if first == last else f"{first} … {last}"


@lru_cache(maxsize=4)
def plan_gather(spec: ModelSpec, layout: Layout, max_elements: int) -> tuple[BucketPlan, ...]:
    """Buckets of at most `max_elements` that cover every HF tensor exactly once.

    The tensors of one Megatron parameter (q, k, v; gate and up of an expert) stay together, and so do the parameters of
    one tensor (a stack of experts) and those that engines fuse (down-projections of latent attention): what is larger
    than `max_elements` has a bucket of its own. Raises UserError if the layout does not fit the model.
    """
    check_layout(spec, layout)
    return tuple(_plan_bucket(entries, spec, layout) for entries in _group(spec, max_elements))


def _group(spec: ModelSpec, max_elements: int) -> Iterator[list[Entry]]:
    bucket: list[Entry] = []
    filled = 0
    for unit in _units(spec):
        size = sum(entry.numel for entry in unit)
        if bucket and (filled + size > max_elements or _dtype(unit) != _dtype(bucket)):
            yield bucket
            bucket, filled = [], 0
        bucket += unit
        filled += size
    yield bucket


def _units(spec: ModelSpec) -> Iterator[list[Entry]]:
    """Entries that must lie in one bucket: they share HF tensors, or engines make one parameter of their tensors.

    A unit has all entries from its first to its last: the map has those that belong together near each other.
    """
    entries = [entry for entry in parameter_map(spec).entries if not entry.tied_copy]
    last = {_together(spec, t.name): number for number, entry in enumerate(entries) for t in entry.hf}
    unit: list[Entry] = []
    end = 0
    for number, entry in enumerate(entries):
        unit.append(entry)
        end = max(end, *(last[_together(spec, tensor.name)] for tensor in entry.hf))
        if number == end:
            yield unit
            unit = []


def _together(spec: ModelSpec, name: str) -> str:
    """The same for tensors that engines can only load together.

    SGLang keeps q_a_proj of DeepSeek-V3 until kv_a_proj_with_mqa comes, within one call: apart, neither is loaded.
    """
    return f"{fused_group(spec.family, name)} {name.rpartition('.')[2]}"


def _dtype(entries: Sequence[Entry]) -> str | None:
    return entries[0].hf[0].dtype


def _plan_bucket(entries: Sequence[Entry], spec: ModelSpec, layout: Layout) -> BucketPlan:
    tensors: list[HfTensor] = []
    starts: dict[str, int] = {}
    runs: list[tuple[int, int, int, Piece]] = []
    staged: list[Message] = []
    end = 0
    for entry in entries:
        for tensor in entry.hf:
            if tensor.name not in starts:
                starts[tensor.name] = end
                tensors.append(tensor)
                end += tensor.numel
        _, chunk = stage_of(entry, spec, layout)
        owners = entry_owners(entry, spec, layout)
        for index, owner in enumerate(owners):
            shard = Shard(entry, index, len(owners), chunk)
            apart = []
            for block in shard.blocks:
                piece = Piece(shard, block, starts[block.hf.name])
                if block.hf_run is not None:
                    start = piece.tensor_start + block.hf_run
                    runs.append((start, start + math.prod(block.size), owner, piece))
                else:
                    apart.append(piece)
            if apart:
                staged.append(Message(owner, tuple(apart), sum(math.prod(p.block.size) for p in apart), None))
    return BucketPlan(tuple(tensors), (*_merge(runs), *staged), end, _dtype(entries))


def _merge(runs: list[tuple[int, int, int, Piece]]) -> Iterator[Message]:
    """Join runs of one owner that follow each other in the buffer without a gap."""
    runs.sort(key=lambda run: run[:3])
    number, previous_end, previous_owner = 0, None, None
    numbers = []
    for start, end, owner, _ in runs:
        if start != previous_end or owner != previous_owner:
            number += 1
        numbers.append(number)
        previous_end, previous_owner = end, owner
    for _, group in groupby(zip(numbers, runs, strict=True), key=lambda item: item[0]):
        joined = [run for _, run in group]
        start, owner = joined[0][0], joined[0][2]
        yield Message(owner, tuple(run[3] for run in joined), joined[-1][1] - start, start)
