"""Which parameters a rank holds under a layout, and which rectangles of which HF tensors they are. No tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import Block, shard_blocks, shard_shape
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import Entry, Place, parameter_map
from moe_asyncrl.models.spec import ModelSpec

EMBEDDING_STAGE = (0, 0)
"""(pipeline rank, chunk) of the embedding in every layout."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter of one rank."""

    entry: Entry
    index: int
    """Which shard of the entry, of `count`."""
    count: int
    chunk: int
    """The model chunk that holds it (interleaved pipeline); 0 without."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local parameter."""
        return shard_shape(self.entry.op, self.entry.shard_axis, self.count)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The rectangles it is made of; what no block covers is vocabulary padding, held at zero."""
        return shard_blocks(self.entry.op, self.entry.shard_axis, self.index, self.count)


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Raise UserError, naming the sizes, if the model cannot be laid out so."""
    layout.layers_of(0, 0, spec.num_layers)
    if spec.is_moe:
        layout.experts_of(0, spec.num_experts)
    elif layout.ep > 1:
        raise UserError(f"layout {layout}: ep is {layout.ep} but {spec.family} has no experts; use ep 1")
    sizes = [("attention heads", spec.num_attention_heads, "tp", layout.tp)]
    if layout.tp <= spec.num_kv_heads:
        sizes.append(("key/value heads", spec.num_kv_heads, "tp", layout.tp))
    elif layout.tp % spec.num_kv_heads:
        raise UserError(f"layout {layout}: tp {layout.tp} is not a multiple of {spec.num_kv_heads} key/value heads")
    if spec.kept_mtp_layers:
        sizes.append(("hidden_size", spec.hidden_size, "tp", layout.tp))
    if spec.shared_expert_size:
        sizes.append(("width of the shared expert", spec.shared_expert_size, "tp", layout.tp))
    if not all(spec.moe_layers):
        sizes.append(("intermediate_size", spec.intermediate_size, "tp", layout.tp))
    if spec.is_moe:
        sizes.append(("moe_intermediate_size", spec.moe_intermediate_size, "etp", layout.etp))
    for what, size, axis, parts in sizes:
        if size % parts:
            raise UserError(f"layout {layout}: {what} {size} is not a multiple of {axis} {parts}")


def rank_shards(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[Shard]:
    """The parameters that `rank` holds, in the order of the map. Raises UserError if the layout does not fit."""
    check_layout(spec, layout)
    at = layout.coordinates(rank)
    for entry in parameter_map(spec).entries:
        pp, chunk = stage_of(entry, spec, layout)
        if pp != at.pp or (entry.tied_copy and (pp, chunk) == EMBEDDING_STAGE):
            continue
        if entry.expert is not None:
            if entry.expert in layout.experts_of(at.ep, spec.num_experts):
                yield Shard(entry, *_part(entry, at.etp, layout.etp), chunk)
        else:
            yield Shard(entry, *_part(entry, at.tp, layout.tp), chunk)


def entry_owners(entry: Entry, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """The ranks that together hold `entry` exactly once, in the order of its shards.

    Of data-, context- and expert-data-parallel copies the first one is taken.
    """
    pp, _ = stage_of(entry, spec, layout)
    first = pp * (layout.world_size // layout.pp)
    if entry.expert is None:
        size, offset = layout.tp, 0
    else:
        size = layout.etp
        offset = entry.expert // (spec.num_experts // layout.ep) * layout.etp
    if entry.shard_axis is None:
        size = 1
    return tuple(first + offset + i for i in range(size))


def stage_of(entry: Entry, spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(pipeline rank, chunk) of an entry."""
    if entry.place is Place.FIRST:
        return EMBEDDING_STAGE
    if entry.place is Place.LAST:
        return layout.pp - 1, layout.chunks - 1
    assert entry.layer is not None
    return layout.owner_of_layer(entry.layer, spec.num_layers)


def _part(entry: Entry, index: int, count: int) -> tuple[int, int]:
    return (0, 1) if entry.shard_axis is None else (index, count)
