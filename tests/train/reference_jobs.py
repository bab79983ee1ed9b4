"""The reference model, run in each worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.batch import Sample
from tests.pool.machine import CPU
from tests.train.checkpoint_jobs import new_state, one_step, weights
from tests.train.parity_jobs import tiny_spec
from tests.train.sharded import Part, fill
from tests.train.step_jobs import REFERENCE, micro_batches, model_of, plain_logprobs, samples


def scored_by_reference(layout: Layout, *, policy: str, reference: str, given: list[Sample]) -> list[list[np.ndarray]]:
    """Log-probabilities under the policy, the reference, and the policy again."""
    from moe_asyncrl.train.build import build_model_on_rank
    from moe_asyncrl.train.reference import from_hf
    from moe_asyncrl.train.score import score

    spec = ModelSpec.from_hf(policy)
    model = build_model_on_rank(spec, layout, CPU, rank=dist.get_rank(), distributed_optimizer=False, hf_dir=policy)
    frozen = from_hf(model, reference)

    def now() -> list[np.ndarray]:
        return score(model, given, temperature=0.8, micro_batch_tokens=64)[0]

    before = now()
    with frozen.in_place():
        inside = now()
    return [before, inside, now()]


def there_and_back(layout: Layout, *, swap: bool, bf16: bool) -> tuple[list[Part], list[tuple[float, float]], bool]:
    """Two updates; between them, if `swap`, a pass of the reference. Weights, figures, and whether all bits stayed."""
    from moe_asyncrl.train.reference import Reference
    from moe_asyncrl.train.score import logprobs_of_batches

    state = new_state(layout, changes={}, dtype=torch.bfloat16 if bf16 else torch.float32)
    frozen = Reference(state.model)
    log = [one_step(state, 0)]
    same = True
    if swap:
        before = bits(state)
        given = micro_batches(samples(tiny_spec(), seed=5), tiny_spec(), layout, tokens=64, replay=False)
        with frozen.in_place():
            changed = [not torch.equal(a, b) for a, b in zip(before, bits(state), strict=True)]
            logprobs_of_batches(state.model, given, temperature=0.8)
        same = any(changed) and all(torch.equal(a, b) for a, b in zip(before, bits(state), strict=True))
    log.append(one_step(state, 1))
    return weights(state), log, same


def bits(state: Any) -> list[torch.Tensor]:
    """Copies of all weights, gradients, and tensors of the optimizer on this rank."""
    found = [p.detach().clone() for chunk in state.model.chunks for p in chunk.parameters()]
    found += [p.main_grad.clone() for chunk in state.model.chunks for p in chunk.parameters()]
    for part in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                found.append(p.detach().clone())
                found += [v.clone() for _, v in sorted(inner.state[p].items()) if isinstance(v, torch.Tensor)]
    return found


def kl_of_trajectories(layout: Layout, *, estimator: str, plant: str = REFERENCE) -> dict[str, float]:
    """KL(policy || reference) of each of the test's samples by name, with replay."""
    from moe_asyncrl.train.kl_penalty import trajectory_kl
    from moe_asyncrl.train.reference import Reference
    from moe_asyncrl.train.score import logprobs_of_batches

    spec = tiny_spec()
    model = model_of(spec, layout, plant=plant)
    frozen = Reference(model)
    fill(model.chunks, vocab_size=spec.vocab_size)
    given = samples(spec)
    batches = micro_batches(given, spec, layout, tokens=48, replay=True)
    old, _ = logprobs_of_batches(model, batches, temperature=0.8, mode="replay")
    with frozen.in_place():
        found, _ = logprobs_of_batches(model, batches, temperature=0.8, mode="replay")
    for batch, values in zip(batches, found or (), strict=False):
        batch.reference_logprobs = values
    names = [s.name for s in given]
    return trajectory_kl(model, batches, old or [None] * len(batches), names, estimator=estimator)  # type: ignore[arg-type]


def plain_kl(layout: Layout) -> dict[str, list[float]]:
    """(reference - policy) log-probability of each trained token of each sample, one sequence at a time."""
    spec = tiny_spec()
    policy, frozen = (model_of(spec, layout, plant=plant).chunks[0] for plant in (None, REFERENCE))
    with torch.no_grad():
        return {
            s.name: [
                float(b - a)
                for a, b, on in zip(
                    plain_logprobs(policy, s, True), plain_logprobs(frozen, s, True), s.trained[1:], strict=True
                )
                if on
            ]
            for s in samples(spec)
        }
