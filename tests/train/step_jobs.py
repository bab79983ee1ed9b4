"""What the trainer's tests run in each worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_asyncrl.algorithms.aggregation import Aggregation, token_weights
from moe_asyncrl.algorithms.kl import Estimator
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.replay.controller import Mode
from moe_asyncrl.train.batch import MicroBatch, RouterShape, Sample, make_micro_batch
from moe_asyncrl.train.objective import PolicyObjective
from moe_asyncrl.train.plan import packing_for
from tests.pool.machine import CPU
from tests.train.parity_jobs import tiny_spec
from tests.train.sharded import Part, fill, over_vocabulary, relative

OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.28, importance_cap=2.0, temperature=0.8)
REFERENCE = "transpose_projection"
"""The reference of the tests is the policy with its attention's output projections transposed."""
KL_COEF = 0.3


def samples(
    spec: ModelSpec, *, count: int = 14, longest: int = 24, aggregation: Aggregation = "token_mean", seed: int = 0
) -> list[Sample]:
    """Random sequences of uneven lengths with everything that the policy loss reads; one of them is not trained."""
    draw = np.random.default_rng(seed)
    made: list[dict[str, Any]] = []
    for i in range(count):
        n = int(draw.integers(2, longest))
        trained = draw.random(n) < 0.7
        trained[0] = False
        if i == 1:
            trained[:] = False
        experts = draw.random((n - 1, spec.num_moe_layers, spec.num_experts)).argsort(-1)[..., : spec.experts_per_token]
        made.append(
            {
                "name": f"t{i}",
                "tokens": draw.integers(0, spec.vocab_size, n).astype(np.int32),
                "trained": trained,
                "advantage": float(draw.normal()),
                "sampler_logprobs": np.where(trained, draw.normal(-3.0, 2.0, n), np.nan).astype(np.float32),
                "experts": experts.astype(np.uint8),
            }
        )
    counts = torch.tensor([int(m["trained"].sum()) for m in made])
    weights = token_weights(counts, aggregation).tolist()
    return [Sample(**m, weight=w) for m, w in zip(made, weights, strict=True)]


def micro_batches(
    given: list[Sample],
    spec: ModelSpec,
    layout: Layout,
    *,
    tokens: int,
    replay: bool,
    vocabulary: range | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches."""
    at = layout.coordinates(dist.get_rank())
    packing = packing_for([len(s.tokens) - 1 for s in given], layout, micro_batch_tokens=tokens)
    number = {layer: i for i, layer in enumerate(spec.moe_layer_indices)}
    own = (layer for chunk in range(layout.chunks) for layer in layout.layers_of(at.pp, chunk, spec.num_layers))
    router = RouterShape(
        layers=spec.num_moe_layers,
        experts=spec.num_experts,
        top_k=spec.experts_per_token,
        own=tuple(sorted(number[layer] for layer in own if layer in number)),
    )
    return [
        make_micro_batch(
            [given[i] for i in numbers],
            layout=layout,
            rank=dist.get_rank(),
            router=router if replay else None,
            vocabulary=vocabulary,
        )
        for numbers in packing.ranks[at.dp]
    ]


def model_of(spec: ModelSpec, layout: Layout, *, plant: str | None = None, **build: Any) -> Any:
    """A model whose weights depend on their names only."""
    from moe_asyncrl.train.build import build_model_on_rank

    model = build_model_on_rank(spec, layout, CPU, rank=dist.get_rank(), distributed_optimizer=False, **build)
    fill(model.chunks, vocab_size=spec.vocab_size, **({plant: True} if plant else {}))
    return model


def policy_gradients(
    layout: Layout,
    *,
    tokens: int = 48,
    recompute: str = "off",
    replay: bool = False,
    old: bool = False,
    plant: str | None = None,
    aggregation: Aggregation = "token_mean",
    changes: dict[str, Any] | None = None,
    kl: Estimator | None = None,
    reference: str = REFERENCE,
    reference_mode: Mode | None = None,
) -> tuple[dict[str, float], dict[str, float], list[Part]]:
    """Sums, maxima and this rank's gradients of the policy loss of one batch.

    With `kl`, of the loss with that estimate of the KL to the reference, whose pass routes by `reference_mode` (as the
    policy if None).
    """
    from moe_asyncrl.train.reference import Reference
    from moe_asyncrl.train.score import logprobs_of_batches
    from moe_asyncrl.train.step import gradients as step_gradients
    from tests.train.sharded import gradients

    spec = tiny_spec(**(changes or {}))
    model = model_of(spec, layout, plant=plant, recompute=recompute)
    given = samples(spec, aggregation=aggregation)
    batches = micro_batches(given, spec, layout, tokens=tokens, replay=replay)
    if old:
        for batch in batches:
            # A function of the token alone, so that it does not depend on the packing.
            batch.old_logprobs = -1.0 - batch.labels[0] % 7 * 0.7
    mode: Mode = "replay" if replay else "off"
    objective = OBJECTIVE
    if kl is not None:
        objective = dataclasses.replace(OBJECTIVE, kl_coef=KL_COEF, kl_estimator=kl)
        fill(model.chunks, vocab_size=spec.vocab_size, **{reference: True})
        frozen = Reference(model)
        fill(model.chunks, vocab_size=spec.vocab_size)
        with frozen.in_place():
            found, _ = logprobs_of_batches(model, batches, temperature=0.8, mode=reference_mode or mode)
        for batch, values in zip(batches, found or (), strict=False):
            batch.reference_logprobs = values
    totals = step_gradients(model, batches, objective, mode=mode)
    return totals.sums, totals.maxima, gradients(model.ddp)


def plain_gradients(
    layout: Layout,
    *,
    replay: bool = False,
    old: bool = False,
    aggregation: Aggregation = "token_mean",
    kl: Estimator | None = None,
) -> tuple[float, list[Part]]:
    """Loss and gradients of the same batch, written out plainly: one sequence at a time, no packing, no schedule."""
    from tests.train.sharded import gradients

    spec = tiny_spec()
    model = model_of(spec, layout)
    (chunk,) = model.chunks
    frozen = model_of(spec, layout, plant=REFERENCE).chunks[0] if kl is not None else None
    total = torch.zeros(())
    given = samples(spec, aggregation=aggregation)
    trained = sum(int(s.trained.sum()) for s in given)
    trained_sequences = sum(bool(s.trained.any()) for s in given)
    for wrapped in model.ddp:
        wrapped.zero_grad_buffer()
    for s in given:
        ids = torch.from_numpy(s.tokens.astype(np.int64))
        logp = plain_logprobs(chunk, s, replay)
        on = torch.from_numpy(s.trained[1:])
        n = int(on.sum())
        if n == 0:
            continue
        new = logp[on]
        before = (-1.0 - ids[1:] % 7 * 0.7)[on] if old else new.detach()
        sampler = torch.from_numpy(s.sampler_logprobs[1:])[on]  # type: ignore[index]
        ratio = torch.exp(new - before)
        surrogate = torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.28) * s.advantage)
        losses = -torch.exp(before - sampler).clamp(max=2.0) * surrogate
        if frozen is not None:
            gone = plain_logprobs(frozen, s, replay).detach()[on] - new
            losses = losses + KL_COEF * {"k1": -gone, "k2": gone**2 / 2, "k3": gone.exp() - 1 - gone}[str(kl)]
        total = total + (losses.sum() / trained if aggregation == "token_mean" else losses.mean() / trained_sequences)
    total.backward()
    return float(total), gradients(model.ddp)


def plain_logprobs(chunk: Any, s: Sample, replay: bool) -> torch.Tensor:
    """Log-probability of each label of one sequence, alone."""
    ids = torch.from_numpy(s.tokens.astype(np.int64))
    if replay:
        rows = torch.from_numpy(s.experts.astype(np.int64))  # type: ignore[union-attr]
        for number, router in enumerate(
            m.router for m in (layer.mlp for layer in chunk.decoder.layers) if hasattr(m, "router")
        ):
            router.router_replay = _Fixed(rows[:, number])
    logits = chunk(ids[None, :-1], torch.arange(len(ids) - 1)[None], None)[0]
    return (logits / OBJECTIVE.temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]


class _Fixed:
    """A router's choice, given."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def get_replay_topk(self, scores: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return scores.gather(1, self.rows), self.rows


def deviation(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative deviation of any tensor; rows that pad the vocabulary of one side are 0 and not compared."""
    assert a.keys() == b.keys()
    found = []
    for name, theirs in b.items():
        ours = a[name]
        if over_vocabulary(name):
            rows = min(len(ours), len(theirs))
            assert not ours[rows:].any() and not theirs[rows:].any()
            ours, theirs = ours[:rows], theirs[:rows]
        found.append(relative(ours, theirs))
    return max(found)
