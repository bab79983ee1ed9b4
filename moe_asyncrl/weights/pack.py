"""From a rank's parameters into messages: the one copy that the sending side makes of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.message_part import part_view
from moe_asyncrl.weights.work import Contribution, Origin

Parameters = Mapping[str, torch.Tensor]
Kept = Callable[[int, torch.Tensor], None]
"""Is shown each piece that was written: its number in the plan, and its elements in the type that they travel in."""


def parameter_problem(parameters: Parameters, spec: ModelSpec, layout: Layout, rank: int) -> str | None:
    """What keeps a rank from having every parameter that the layout gives it, in the right shape; None if it has."""
    for shard in rank_shards(spec, layout, rank):
        found = parameters.get(shard.entry.name)
        if found is None:
            return f"Megatron parameter {shard.entry.name} is missing"
        if tuple(found.shape) != shard.shape:
            return (
                f"Megatron parameter {shard.entry.name} has shape {list(found.shape)}, the layout needs "
                f"{list(shard.shape)}"
            )
    return None


def piece_at_source(origin: Origin, parameters: Parameters) -> torch.Tensor:
    """The elements of a piece in the HF tensor's orientation: a view of the parameter."""
    local = parameters[origin.entry].detach()[origin.block.local_slices]
    return origin.block.to_hf(local)[origin.inner]


def write(
    given: Contribution,
    origins: Mapping[int, Origin],
    parameters: Parameters,
    into: torch.Tensor,
    *,
    in_place: bool,
    kept: Kept | None = None,
) -> None:
    """Copy the pieces of this rank's contribution into uint8 memory, converting them to the type they travel in.

    `in_place`: `into` is the payload of the message [payload_bytes]; else the pieces lie packed [packed_bytes].
    """
    for piece in given.pieces:
        if in_place:
            target = part_view(given.parts[piece.home], into)[piece.inside]
        else:
            target = part_view(piece.part, into)
        target.copy_(piece_at_source(origins[piece.number], parameters))
        if kept is not None:
            kept(piece.number, target)


def place(given: Contribution, packed: torch.Tensor, payload: torch.Tensor) -> None:
    """Copy what another rank has packed to where it lies in the message."""
    for piece in given.pieces:
        part_view(given.parts[piece.home], payload)[piece.inside].copy_(part_view(piece.part, packed))
