"""Modes of the replay, and what routers count, in each worker."""

from __future__ import annotations

from typing import Any

import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.batch import Sample
from tests.replay.jobs import OBJECTIVE, batches_of, build, perturb, routers


def own_routing(
    layout: Layout, *, hf_dir: str, given: list[Sample], recompute: str, follow: str = "replay"
) -> dict[str, Any]:
    """The old policy's pass records its routing; then the routers move, and one step replays it.

    Returns how many real decisions of the step hooks saw made as in that pass, and how many otherwise.
    """
    from moe_asyncrl.train.score import logprobs_of_batches
    from moe_asyncrl.train.step import gradients

    model = build(layout, hf_dir, recompute=recompute)
    batches = batches_of(given, model, tokens=48, multiple=16)
    for batch in batches:
        batch.rows = batch.known = None  # nothing from the sampler
    calls: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def note(layer: int) -> Any:
        return lambda _m, _i, out: calls.setdefault((layer, torch.is_grad_enabled()), []).append(out[1].clone())

    hooks = [router.register_forward_hook(note(layer)) for layer, router in routers(model)]
    logprobs_of_batches(model, batches, temperature=1.0, mode="record")
    first = {layer: maps for (layer, _), maps in calls.items()}
    calls.clear()
    perturb(model, 0.5)
    totals = gradients(model, batches, OBJECTIVE, mode=follow)  # type: ignore[arg-type]
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(hooks) * (2 if recompute == "full" else 1)
    same = other = 0
    for (layer, _), maps in calls.items():
        for before, after, batch in zip(first[layer], maps, batches, strict=True):
            equal = (before == after).all(-1)[batch.counted]
            same += int(equal.sum())
            other += int((~equal).sum())
    return {"same": same, "other": other, "sums": totals.sums}


def counted_by_routers(
    layout: Layout, *, hf_dir: str, given: list[Sample], multiple: int, mode: str, plant: bool = False
) -> dict[str, Any]:
    """Expert loads that the routers of this rank gathered in a step with a balance loss, and the gradients.

    `plant`: Megatron-Core is told of no padding.
    """
    from moe_asyncrl.train import passes
    from moe_asyncrl.train.step import gradients
    from tests.train.sharded import gradients as parts

    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    model = build(layout, hf_dir, dtype=torch.float64, router_dtype="fp64", **balance)
    loads: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Any:
        # Read at each call, as Megatron-Core starts anew when the gradients are done.
        return lambda router, _i, _o: loads.update({layer: router.local_tokens_per_expert.double().clone()})

    for layer, router in routers(model):
        router.local_tokens_per_expert.zero_()
        router.register_forward_hook(note(layer))
    batches = batches_of(given, model, tokens=4096, multiple=multiple)
    told = passes._padding_for
    if plant:
        passes._padding_for = lambda chunk, batch: torch.zeros_like(told(chunk, batch))
    try:
        gradients(model, batches, OBJECTIVE, mode=mode)  # type: ignore[arg-type]
    finally:
        passes._padding_for = told
    return {"loads": loads, "gradients": parts(model.ddp)}
