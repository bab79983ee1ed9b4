"""Which rank sends which part of which HF tensor to the collecting rank, bucket by bucket. Pure arithmetic.

A bucket is one flat buffer that holds whole HF tensors back to back, in export order. What a rank owns of it falls into
messages: a run of elements that are adjacent in the buffer is received in place; a block of columns (a row-parallel
matrix under tensor parallelism) is not adjacent and goes through a staging buffer.
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

    @property
    def names(self) -> str:
        """For error messages: the first and the last tensor."""
        first, last = self.tensors[0].name, self.tensors[-1].name
        return first if first == last else f"{first} … {last}"


@lru_cache(maxsize=4)
def plan_gather(spec: ModelSpec, layout: Layout, max_elements: int) -> tuple[BucketPlan, ...]:
    """Buckets of at most `max_elements` that cover every HF tensor exactly once.

    The tensors of one Megatron parameter (q, k, v; gate and up of an expert) stay together: a parameter larger than
    `max_elements` has a bucket of its own. Raises UserError if the layout does not fit the model.
    """
    check_layout(spec, layout)
    return tuple(_plan_bucket(entries, spec, layout) for entries in _group(spec, max_elements))


def _group(spec: ModelSpec, max_elements: int) -> Iterator[list[Entry]]:
    bucket: list[Entry] = []
    filled = 0
    for entry in parameter_map(spec).entries:
        if entry.tied_copy:
            continue
        size = sum(tensor.numel for tensor in entry.hf)
        if bucket and filled + size > max_elements:
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += size
    yield bucket


def _plan_bucket(entries: Sequence[Entry], spec: ModelSpec, layout: Layout) -> BucketPlan:
    tensors: list[HfTensor] = []
    runs: list[tuple[int, int, int, Piece]] = []
    staged: list[Message] = []
    end = 0
    for entry in entries:
        starts: dict[str, int] = {}
        for tensor in entry.hf:
            starts[tensor.name] = end
            tensors.append(tensor)
            end += tensor.numel
        _, chunk = stage_of(entry, spec, layout)
        owners = entry_owners(entry, spec, layout)
        for index, owner in enumerate(owners):
            shard = Shard(entry, index, len(owners), chunk)
            columns = []
            for block in shard.blocks:
                piece = Piece(shard, block, starts[block.hf.name])
                if block.size[1:] == block.hf.shape[1:]:
                    start = piece.tensor_start + block.hf_start[0] * (block.hf.numel // block.hf.shape[0])
                    runs.append((start, start + math.prod(block.size), owner, piece))
                else:
                    columns.append(piece)
            if columns:
                staged.append(Message(owner, tuple(columns), sum(math.prod(p.block.size) for p in columns), None))
    return BucketPlan(tuple(tensors), (*_merge(runs), *staged), end)


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
