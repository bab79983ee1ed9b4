"""How a trainer's pipeline stages cut the MoE layers of a model: blocks in which routing rows travel."""

from __future__ import annotations

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec


def routing_blocks(spec: ModelSpec, layout: Layout) -> tuple[tuple[int, int], ...]:
    """[start, end) of the MoE layers, numbered among themselves, of each stage that has some, in order.

    With interleaving each model chunk is a stage. Raises UserError as `Layout.layers_of`.
    """
    blocks = []
    at = 0
    for stage in range(layout.pp * layout.chunks):
        layers = layout.layers_of(stage % layout.pp, stage // layout.pp, spec.num_layers)
        count = sum(spec.moe_layers[layer] for layer in layers)
        if count:
            blocks.append((at, at + count))
            at += count
    return tuple(blocks)
