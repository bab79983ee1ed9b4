"""Global names for the parameters of a rank's model chunks.

Megatron numbers layers within a chunk and experts within a rank; the parameter map numbers both over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from moe_asyncrl.checkpoint.ledger import Ledger
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.shards import Shard, rank_shards
from moe_asyncrl.models.spec import ModelSpec

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.|\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)(?=\.|$)")


def global_name(name: str, layers: range, first_expert: int) -> str:
    """The global name of a chunk's parameter: `layers` are the chunk's global layers, `first_expert` the rank's first.

    Prefixes of wrappers (`module.`) are dropped. Raises UserError for a layer that the chunk should not have.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)
    match = _LAYER.match(name)
    if match is None:
        return name
    local = int(match[1])
    if local >= len(layers):
        raise UserError(f"parameter {name} is outside the {len(layers)} layers of its pipeline stage")
    return f"decoder.layers.{layers[local]}.{name[match.end() :]}"


def global_parameters(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec, layout: Layout, rank: int
) -> dict[str, torch.Tensor]:
    """This rank's parameters, and its buffers that are weights (expert biases), by canonical global name.

    The canonical name is that of Megatron-Core's local layers.

    Raises:
        UserError: a parameter is missing, extra, there twice, or has another shape than the layout says; all at once.
    """
    if len(chunks) != layout.chunks:
        raise UserError(f"rank {rank} has {len(chunks)} model chunks, layout {layout} says {layout.chunks}")
    at = layout.coordinates(rank)
    first_expert = layout.experts_of(at.ep, spec.num_experts).start if spec.is_moe else 0
    shards = {shard.entry.name: shard for shard in rank_shards(spec, layout, rank)}
    known = parameter_map(spec)
    ledger = Ledger(shards, what="Megatron parameters", where=f"rank {rank} of layout {layout}")
    found: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        layers = layout.layers_of(at.pp, number, spec.num_layers)
        for name, parameter in chunk.named_parameters():
            canonical = known.find(global_name(name, layers, first_expert)).name
            ledger.enter(canonical)
            found[canonical] = parameter
        for name, buffer in chunk.named_buffers():
            canonical = global_name(name, layers, first_expert)
            if canonical in shards and shards[canonical].entry.buffer:
                ledger.enter(canonical)
                found[canonical] = buffer
    ledger.settle()
    _check_shapes(found, shards, rank)
    return {name: found[name] for name in shards}


def _check_shapes(found: Mapping[str, torch.Tensor], shards: Mapping[str, Shard], rank: int) -> None:
    for name, shard in shards.items():
        if tuple(found[name].shape) != shard.shape:
            raise UserError(
                f"rank {rank}: Megatron parameter {name} has shape {list(found[name].shape)}, "
                f"the layout needs {list(shard.shape)}"
            )
