"""A sampler that truncates and a trainer mean the same by a log-probability, on every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.rollout.assemble import mask_rows
from moe_asyncrl.train.batch import Sample
from tests.engines.fixtures import TestEngine
from tests.engines.sampling import generate, requests
from tests.pool.pool import WorkerPool
from tests.replay.support_jobs import kept_ids
from tests.replay.test_masks import dense
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation
from tests.train.update_jobs import random_logits

TOLERANCE = 1e-5
VOCABULARY = 512
TRUNCATED: dict[str, dict[str, float]] = {
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9, "top_k": VOCABULARY},
    "min_p": {"min_p": 0.05, "top_k": VOCABULARY},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "all of the vocabulary": {"top_k": VOCABULARY},
}
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, ep=2), Layout(pp=2), Layout(cp=2)]


def sampled_from(engine: TestEngine, temperature: float, name: str, sampling: dict[str, float]) -> list[Sample]:
    """Completions of the engine as samples, whose log-probabilities are the engine's inside its masks."""
    batch = requests(4, tokens=14, seed=len(name), temperature=temperature, **sampling)
    made = []
    for i, (r, c) in enumerate(zip(batch, generate(engine, batch, mask=bool(sampling)), strict=True)):
        p = len(r.input_ids)
        mask, support = mask_rows(c, p)
        logprobs = np.concatenate([np.full(p, np.nan, np.float32), c.logprobs]) if support is None else support
        made.append(
            Sample(
                name=f"{name}-{i}",
                tokens=np.concatenate([np.asarray(r.input_ids, dtype=np.int32), c.output_ids]),
                trained=np.arange(p + len(c.output_ids)) >= p,
                sampler_logprobs=logprobs,
                mask=mask,
                experts=c.experts,
            )
        )
    return made


@pytest.fixture(scope="module", params=[0.7, 1.3], ids=lambda t: f"temperature{t}")
def sampled(
    engine: Callable[..., TestEngine], request: pytest.FixtureRequest
) -> tuple[TestEngine, float, list[Sample]]:
    found = engine()
    found.reset()
    whole = sampled_from(found, request.param, "nothing truncated", {})
    cut = [s for name, sampling in TRUNCATED.items() for s in sampled_from(found, request.param, name, sampling)]
    assert min(np.diff(s.mask.indptr).max() for s in cut if s.mask is not None) > 1
    return found, request.param, [*whole, *cut]


def gaps(given: list[Sample], found: list[np.ndarray]) -> dict[str, float]:
    """Largest deviation of each trajectory."""
    return {
        s.name: float(np.abs(ours[s.trained] - s.sampler_logprobs[s.trained]).max())  # type: ignore[index]
        for s, ours in zip(given, found, strict=True)
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_trainers_logprobs_are_the_engines_inside_its_masks(
    pool: WorkerPool, sampled: tuple[TestEngine, float, list[Sample]], layout: Layout
) -> None:
    engine, temperature, samples = sampled
    job = {"layout": layout, "hf_dir": str(engine.model), "given": samples, "temperature": temperature}
    for found in pool.run("tests.replay.support_jobs:scored", **job):
        assert max(gaps(samples, found).values()) <= TOLERANCE


def test_a_dropped_mask_and_another_temperature_would_be_seen(
    pool: WorkerPool, sampled: tuple[TestEngine, float, list[Sample]]
) -> None:
    engine, temperature, samples = sampled
    job = {"layout": Layout(), "hf_dir": str(engine.model)}
    dropped = [dataclasses.replace(s, mask=None) for s in samples]
    (found,) = pool.run("tests.replay.support_jobs:scored", **job, given=dropped, temperature=temperature)
    for name, gap in gaps(samples, found).items():
        cut = not name.startswith(("nothing", "all of the"))
        assert gap >= 100 * TOLERANCE if cut else gap <= TOLERANCE, name
    (found,) = pool.run("tests.replay.support_jobs:scored", **job, given=samples, temperature=temperature + 0.1)
    assert min(gaps(samples, found).values()) >= 100 * TOLERANCE
    # Masks of the token before: the ids are others, and so is what they add up to.
    moved = [s if s.mask is None else dataclasses.replace(s, mask=shifted(s)) for s in samples]
    (found,) = pool.run("tests.replay.support_jobs:scored", **job, given=moved, temperature=temperature)
    assert max(gaps(samples, found).values()) >= 100 * TOLERANCE


def shifted(s: Sample) -> object:
    assert s.mask is not None
    offsets = s.mask.indptr.copy()
    first = int(s.trained.argmax())
    offsets[first + 1 : -1] = s.mask.indptr[first + 2 :]
    return dataclasses.replace(s.mask, indptr=offsets)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_values_and_gradients_over_a_divided_vocabulary_equal_float64(pool: WorkerPool, layout: Layout) -> None:
    """The gradient of a loss that all tensor-parallel ranks have, also at positions that keep the whole vocabulary."""
    logits, labels, weights = random_logits()
    exact = logits[0].double().requires_grad_()
    rows = [r or list(range(50)) for r in kept_ids(labels[0], 50)]
    expected = dense(exact, labels[0], rows, 0.7)
    (expected * weights[0]).sum().backward()
    assert exact.grad is not None
    answers = pool.run("tests.replay.support_jobs:operator", layout=layout)
    gradient = np.concatenate([g for _, g in answers], axis=-1)
    for found, _ in answers:
        assert np.abs(found - expected.detach().numpy()).max() <= TOLERANCE
    scale = float(exact.grad.abs().max())
    assert np.abs(gradient - exact.grad.numpy()).max() <= TOLERANCE * scale
    # Planted: the gradient of the whole vocabulary's softmax.
    other = logits[0].double().requires_grad_()
    (torch.log_softmax(other / 0.7, -1).gather(1, labels[0][:, None])[:, 0] * weights[0]).sum().backward()
    assert other.grad is not None and float((exact.grad - other.grad).abs().max()) >= 100 * TOLERANCE * scale


def test_policy_gradients_with_masks_equal_the_plain_loss_on_every_layout(pool: WorkerPool) -> None:
    ((loss, parts),) = pool.run("tests.replay.support_jobs:plain_gradients", layout=Layout())
    plain = assemble([parts])
    for layout in (Layout(), Layout(tp=2, ep=2), Layout(pp=2), Layout(cp=2), Layout(pp=2, dp=2, ep=2)):
        answers = pool.run("tests.replay.support_jobs:policy_gradients", layout=layout)
        assert answers[0][0] == pytest.approx(loss, rel=TOLERANCE), layout
        assert deviation(assemble([a[1] for a in answers]), plain) < TOLERANCE, layout
    for plant in ("last", "all"):
        ((_, parts),) = pool.run("tests.replay.support_jobs:policy_gradients", layout=Layout(), plant=plant)
        assert deviation(assemble([parts]), plain) >= 100 * TOLERANCE, plant
