"""Finding the routers that a replay must drive: those that are really called, numbered over the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.replay.controller import ReplayController


def routers_of(chunks: Sequence[Any], spec: ModelSpec, layout: Layout, pp_rank: int) -> list[tuple[int, Any]]:
    """(MoE layer, router) of this rank's chunks, MoE layers numbered from 0 over the whole model, in rising order.

    A dense layer has no router and takes no number. Only the decoder's own layers are walked: a router that hangs
    somewhere else (a multi-token-prediction head, a second copy of the decoder) is never called with these rows.

    Raises:
        UserError: a layer that should have a router has none or the other way round, or a layer is not where the
            layout says.
    """
    number = {layer: i for i, layer in enumerate(spec.moe_layer_indices)}
    found: list[tuple[int, Any]] = []
    for c, chunk in enumerate(chunks):
        expected = layout.layers_of(pp_rank, c, spec.num_layers)
        layers = chunk.decoder.layers
        here = [layer.layer_number - 1 for layer in layers]
        if here != list(expected):
            raise UserError(
                f"pipeline rank {pp_rank}, chunk {c}: holds layers {here}, the layout says {list(expected)}"
            )
        for index, layer in zip(expected, layers, strict=True):
            router = getattr(layer.mlp, "router", None)
            if (router is not None) != (index in number):
                raise UserError(
                    f"layer {index}: {'a' if router is not None else 'no'} router, config.json says otherwise"
                )
            if router is not None:
                found.append((number[index], router))
    return sorted(found, key=lambda pair: pair[0])


def routers_run_again(config: Any) -> bool:
    """Whether Megatron-Core's `TransformerConfig` has routers run a second time in the backward pass."""
    if config.recompute_granularity == "selective":
        return "moe" in config.recompute_modules
    return bool(config.recompute_granularity == "full")


def attach_replay(
    chunks: Sequence[Any], spec: ModelSpec, layout: Layout, *, pp_rank: int, rank: int
) -> ReplayController | None:
    """A controller on all routers of this rank; None for a model without experts. Its mode is `off` at first."""
    if not spec.is_moe:
        return None
    return ReplayController(
        routers_of(chunks, spec, layout, pp_rank),
        num_experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        recompute=routers_run_again(chunks[0].config),
        rank=rank,
    )
