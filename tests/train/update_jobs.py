"""Single updates and their parts, run in each worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_asyncrl.config.recipe import Optimizer
from moe_asyncrl.models.layout import Layout
from tests.pool.machine import CPU
from tests.train.checkpoint_jobs import new_state, weights
from tests.train.parity_jobs import tiny_spec
from tests.train.step_jobs import OBJECTIVE, micro_batches, samples


def logprobs_and_entropy(
    layout: Layout, *, temperature: float, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities, entropy, and the gradient of their weighted sum for this rank's part of random logits."""
    from megatron.core import parallel_state

    from moe_asyncrl.train import logprobs

    logits, labels, weights_ = random_logits()
    rank = parallel_state.get_tensor_model_parallel_rank()
    part = logits.chunk(layout.tp, dim=-1)[rank].to(getattr(torch, dtype)).clone().requires_grad_()
    before = part.detach().clone()
    found = logprobs.token_logprobs(part, labels, temperature=temperature)
    # Small pieces, so that the loop over them is walked.
    logprobs.ENTROPY_ELEMENTS, kept = 64, logprobs.ENTROPY_ELEMENTS
    entropy = logprobs.token_entropy(
        part, temperature=temperature, group=parallel_state.get_tensor_model_parallel_group()
    )
    logprobs.ENTROPY_ELEMENTS = kept
    (found * weights_).sum().backward()
    assert part.grad is not None and torch.equal(part.detach(), before), "the logits themselves are left alone"
    return found.detach().numpy(), entropy.numpy(), part.grad.float().numpy()


def random_logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [1, 30, 50] that spread widely, labels and weights [1, 30]."""
    g = torch.Generator().manual_seed(0)
    return (
        5 * torch.randn(1, 30, 50, generator=g),
        torch.randint(0, 50, (1, 30), generator=g),
        torch.randn(1, 30, generator=g),
    )


def adam_against_torch(layout: Layout, *, steps: int) -> tuple[list[Any], list[Any], float]:
    """Weights after some updates by our optimizer, and by torch's AdamW on the gradients written out by hand."""
    from moe_asyncrl.train.optimizer import set_rates

    settings = Optimizer(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, clip_grad=0.5)
    state = new_state(layout, changes={}, settings=settings)
    (ddp,) = state.model.ddp
    parameters = list(ddp.module.named_parameters())
    copies = {n: p.detach().double().clone().requires_grad_() for n, p in parameters}
    matrices = [c for n, c in copies.items() if dict(parameters)[n].dim() > 1]
    vectors = [c for n, c in copies.items() if dict(parameters)[n].dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    norm = 0.0
    for step in range(steps):
        ddp.zero_grad_buffer()
        g = torch.Generator().manual_seed(step)
        for n, p in parameters:
            p.main_grad.copy_(torch.randn(p.shape, generator=g) * (3.0 if "router" in n else 1.0))
            copies[n].grad = p.main_grad.double().clone()
        lr = 1e-2 / (1 + step)
        set_rates(state.optimizer, lr=lr, weight_decay=0.1)
        for group in reference.param_groups:
            group["lr"] = lr
        torch.nn.utils.clip_grad_norm_(copies.values(), 0.5)
        reference.step()
        _, norm, _ = state.optimizer.step()
    ours = [(n, p.detach().numpy().copy()) for n, p in parameters]
    return ours, [(n, copies[n].detach().float().numpy()) for n, _ in parameters], float(norm)


def empty_update(layout: Layout) -> tuple[list[Any], list[Any], Any]:
    """Weights before and after an update without a single trained token, Adam's moments being in motion."""
    from moe_asyncrl.train.step import update
    from tests.train.checkpoint_jobs import one_step

    state = new_state(layout, changes={})
    one_step(state, 0)
    before = weights(state)
    spec = state.model.spec
    silent = [dataclasses.replace(s, trained=s.trained & False, weight=0.0) for s in samples(spec)][: layout.dp - 1]
    batches = micro_batches(silent, spec, layout, tokens=64, replay=False)
    done = update(state.model, state.optimizer, batches, OBJECTIVE, lr=1.0)
    return before, weights(state), done


def diverging(layout: Layout, *, where: str) -> None:
    """An update on a batch that poisons the loss, or the weights of one rank's router."""
    from moe_asyncrl.train.step import update

    state = new_state(layout, changes={})
    given = samples(state.model.spec)
    if where == "loss":
        given[0] = dataclasses.replace(given[0], advantage=float("inf"))
    batches = micro_batches(given, state.model.spec, layout, tokens=64, replay=False)
    update(state.model, state.optimizer, batches, OBJECTIVE, lr=1e-3)


def routers(layout: Layout, *, moe_layers: tuple[bool, ...], plant: str | None = None) -> list[tuple[int, int]]:
    """(MoE layer, Megatron's layer number) of this rank's routers."""
    from moe_asyncrl.train.model import build_model
    from moe_asyncrl.train.replay_hooks import routers_of

    spec = tiny_spec(moe_layers=moe_layers)
    chunks = build_model(spec, layout, CPU)
    if plant == "dense as moe":
        spec = tiny_spec(moe_layers=tuple(reversed(moe_layers)))
    if plant == "second decoder":
        # Another decoder hangs in the model and is never called.
        chunks[0].twin = build_model(spec, layout, CPU)[0].decoder
    found = routers_of(chunks, spec, layout, layout.coordinates(dist.get_rank()).pp)
    called: list[int] = []
    for layer, router in found:
        router.register_forward_hook(lambda *_args, layer=layer: called.append(layer))
    if layout.pp == 1:
        with torch.no_grad():
            chunks[0](torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None)
        assert called == [layer for layer, _ in found], "each router is called, once, in order"
    return [(layer, router.layer_number) for layer, router in found]
