"""Module trees with Megatron-Core's parameter names: for name sets whose layers a CPU cannot build."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import NameSet
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec


class Tree(torch.nn.Module):
    """Nested modules that hold parameters and buffers under the given dotted names."""

    def __init__(
        self, parameters: Iterable[tuple[str, tuple[int, ...]]], buffers: Iterable[tuple[str, tuple[int, ...]]] = ()
    ) -> None:
        super().__init__()
        owned = [
            *((name, shape, True) for name, shape in parameters),
            *((name, shape, False) for name, shape in buffers),
        ]
        for name, shape, trained in owned:
            *path, last = name.split(".")
            node: torch.nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, torch.nn.Module())
                node = node.get_submodule(part)
            value = torch.full(shape, float("nan"))
            if trained:
                node.register_parameter(last, torch.nn.Parameter(value))
            else:
                node.register_buffer(last, value)


def chunks_of(spec: ModelSpec, layout: Layout, rank: int, names: NameSet, prefix: str = "") -> list[Tree]:
    """A rank's chunks, numbered within the rank as Megatron-Core does. Values are NaN."""
    at = layout.coordinates(rank)
    found: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(layout.chunks)]
    buffers: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(layout.chunks)]
    for shard in rank_shards(spec, layout, rank):
        name = shard.entry.named(names)
        if shard.entry.layer is not None:
            first = layout.layers_of(at.pp, shard.chunk, spec.num_layers).start
            name = name.replace(f"layers.{shard.entry.layer}.", f"layers.{shard.entry.layer - first}.", 1)
        if shard.entry.expert is not None:
            local = shard.entry.expert - layout.experts_of(at.ep, spec.num_experts).start
            name = re.sub(rf"(local_experts\.|\.weight|\.bias){shard.entry.expert}(?=\.|$)", rf"\g<1>{local}", name)
        (buffers if shard.entry.buffer else found)[shard.chunk].append((prefix + name, shard.shape))
    return [Tree(*both) for both in zip(found, buffers, strict=True)]
