"""What the replay tests run in each worker. The witness is a hook on every router, not our own bookkeeping."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.batch import MicroBatch, Sample, make_micro_batch
from moe_asyncrl.train.objective import PolicyObjective
from moe_asyncrl.train.plan import packing_for
from tests.pool.machine import CPU

OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.28, importance_cap=2.0, temperature=1.0)

Seen = dict[tuple[str, int, int], list[tuple[int, ...]]]
"""(trajectory, row, global layer) -> the experts that the router used, each time that it was called for the row."""


def build(layout: Layout, hf_dir: str, *, recompute: str = "off", **options: Any) -> Any:
    """The model of an HF directory on this rank; `options` go on to `build_model`."""
    from moe_asyncrl.train.build import build_model_on_rank

    spec = ModelSpec.from_hf(hf_dir)
    return build_model_on_rank(
        spec,
        layout,
        CPU,
        rank=dist.get_rank(),
        recompute=recompute,  # type: ignore[arg-type]
        distributed_optimizer=False,
        hf_dir=hf_dir,
        **options,
    )


def batches_of(given: list[Sample], model: Any, *, tokens: int, multiple: int = 8) -> list[MicroBatch]:
    """This rank's micro-batches, padding included."""
    layout: Layout = model.layout
    packing = packing_for([len(s.tokens) - 1 for s in given], layout, micro_batch_tokens=tokens)
    return [
        make_micro_batch(
            [given[i] for i in numbers], layout=layout, rank=model.rank, multiple=multiple, router=model.router_shape
        )
        for numbers in packing.ranks[layout.coordinates(model.rank).dp]
    ]


def routers(model: Any) -> list[tuple[int, Any]]:
    """(global layer, router) of this rank, by Megatron's own layer numbers."""
    return [
        (layer.layer_number - 1, layer.mlp.router)
        for chunk in model.chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    ]


def perturb(model: Any, scale: float) -> None:
    """Move every router's weights, the same way on every rank that has it."""
    for layer, router in routers(model):
        generator = torch.Generator().manual_seed(layer)
        router.weight.data += scale * torch.randn(router.weight.shape, generator=generator)


def replayed(
    layout: Layout,
    *,
    hf_dir: str,
    given: list[Sample],
    scale: float = 0.0,
    recompute: str = "off",
    mode: str = "replay",
    tokens: int = 48,
    allow_missing: bool = False,
) -> dict[str, Any]:
    """Experts that the routers used, router gradients and the loss of one step over `given`."""
    from moe_asyncrl.train.step import gradients

    model = build(layout, hf_dir, recompute=recompute)
    perturb(model, scale)
    batches = batches_of(given, model, tokens=tokens)
    # The forward pass of a recomputed layer runs without gradients, its recomputation with them: two lists, each in
    # the order of the micro-batches.
    calls: dict[tuple[int, bool], list[torch.Tensor]] = {}
    hooks = [
        router.register_forward_hook(
            lambda _m, _i, output, layer=layer: calls.setdefault((layer, torch.is_grad_enabled()), []).append(
                output[1].detach().clone()
            )
        )
        for layer, router in routers(model)
    ]
    totals = gradients(model, batches, OBJECTIVE, mode=mode, allow_missing=allow_missing)  # type: ignore[arg-type]
    for hook in hooks:
        hook.remove()
    seen: Seen = {}
    assert len(calls) == (2 if recompute == "full" else 1) * len(hooks)
    for (layer, _), maps in calls.items():
        for used, batch in zip(maps, batches, strict=True):
            for owner in batch.routed_owners:
                for t in range(owner.start, owner.end):
                    experts = tuple(used[t].nonzero().flatten().tolist())
                    seen.setdefault((owner.name, owner.first + t - owner.start, layer), []).append(experts)
    gates = {
        layer: float(
            (router.weight.main_grad if hasattr(router.weight, "main_grad") else router.weight.grad).abs().max()
        )
        for layer, router in routers(model)
    }
    return {"seen": seen, "gates": gates, "loss": totals.sums["loss"], "sums": totals.sums}


def experts_of(used: Seen, sample: Sample, layers: tuple[int, ...]) -> np.ndarray:
    """[rows, MoE layers, K], sorted, of one trajectory; every call must agree."""
    rows = []
    for row in range(len(sample.tokens) - 1):
        each = []
        for layer in layers:
            (experts,) = set(used[(sample.name, row, layer)])
            each.append(experts)
        rows.append(each)
    return np.asarray(rows)


def scored(layout: Layout, *, hf_dir: str, given: list[Sample], mode: str) -> list[np.ndarray]:
    """Log-probabilities of every token of `given` under the trainer's weights."""
    from moe_asyncrl.train.score import score

    return score(build(layout, hf_dir), given, temperature=1.0, mode=mode)[0]  # type: ignore[arg-type]
