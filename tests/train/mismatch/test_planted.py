"""Causes planted into what a real engine sampled: each is named first, by a real Megatron model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moe_asyncrl.data.trajectory import SamplingParams, Trajectory
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.mismatch.causes import Mismatch
from tests.engines.fixtures import TestEngine
from tests.pool.pool import WorkerPool
from tests.train.mismatch.recorded import VERSION, moved_weights, sampled, with_rows

JOB = "tests.train.mismatch.jobs:taken_apart"
NUMERICS = 1e-9
"""Mean k3 between a float32 engine and a float32 trainer of the same weights."""


@pytest.fixture(scope="module")
def plain(engine: Callable[..., TestEngine]) -> tuple[Path, list[Trajectory]]:
    found = engine()
    found.reset()
    return found.model, sampled(found, SamplingParams(temperature=1.0))


@pytest.fixture(scope="module")
def moved(plain: tuple[Path, list[Trajectory]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved_weights(plain[0], tmp_path_factory.mktemp("moved") / "model", scale=0.02)


@pytest.fixture
def study(pool: WorkerPool, plain: tuple[Path, list[Trajectory]], moved: Path) -> Callable[..., Mismatch]:
    """Take trajectories apart. The engine's weights are version 5; those of 6 are moved."""

    def go(given: list[Trajectory], **how: object) -> Mismatch:
        sources = {VERSION: str(plain[0]), VERSION + 1: str(moved)}
        (found,) = pool.run(JOB, layout=Layout(), **{"given": given, "sources": sources, "evaluated": VERSION, **how})
        return found

    return go


def test_without_a_plant_there_is_nothing_to_name(
    study: Callable[..., Mismatch], plain: tuple[Path, list[Trajectory]]
) -> None:
    found = study(plain[1])
    assert found.gap.kl < NUMERICS and found.gap.max_abs < 1e-5
    assert all(layer.flips == 0 and layer.agreement == 1 for layer in found.layers)


def first(found: Mismatch, cause: str) -> None:
    assert found.named is not None and found.named.cause == cause, [(f.cause, f.drop) for f in found.findings]
    assert found.gap.kl > 100 * NUMERICS
    assert found.named.share > 0.9 and found.named.gap.kl < 0.1 * found.gap.kl


def test_a_wrong_temperature(study: Callable[..., Mismatch], engine: Callable[..., TestEngine]) -> None:
    given = sampled(engine(), SamplingParams(temperature=0.7))
    found = study(given, temperature=1.0)
    first(found, "temperature")
    assert found.temperature == pytest.approx(0.7, abs=2e-3)
    # The record says the truth, so that alone would do.
    assert any(f.how.startswith("the recorded temperature 0.7") and f.share > 0.9 for f in found.tried)


def test_weights_one_version_old(study: Callable[..., Mismatch], plain: tuple[Path, list[Trajectory]]) -> None:
    found = study(plain[1], evaluated=VERSION + 1)
    first(found, "weights")
    assert found.versions[0].version == VERSION and found.versions[0].weights


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ("token", "rows of layer 2 stand at the next token"),
        ("layer", "layer 2 has the rows of layer 1, its own are nowhere"),
        ("swapped", "rows of layer 1 stand at layer 2; rows of layer 2 stand at layer 1"),
    ],
)
def test_rows_of_one_layer_shifted(
    study: Callable[..., Mismatch], plain: tuple[Path, list[Trajectory]], plant: str, told: str
) -> None:
    def shifted(t: Trajectory) -> Trajectory:
        rows = np.asarray(t.routing_experts).copy()
        if plant == "token":
            rows[:, 2] = np.roll(rows[:, 2], 1, axis=0)
        elif plant == "layer":
            rows[:, 2] = rows[:, 1]
        else:
            rows[:, [1, 2]] = rows[:, [2, 1]]
        return with_rows(t, rows)

    found = study([shifted(t) for t in plain[1]])
    first(found, "rows")
    assert found.named is not None and found.named.how == told
    flips = [layer.flips or 0.0 for layer in found.layers]
    assert flips[0] == 0 and flips[2] > 0.5


@pytest.fixture(scope="module")
def truncated(plain: tuple[Path, list[Trajectory]], engine: Callable[..., TestEngine]) -> list[Trajectory]:
    return sampled(engine(), SamplingParams(temperature=1.0, top_k=20, top_p=0.8, min_p=0.02), seed=4)


def test_a_mask_that_both_sides_have_leaves_no_gap(study: Callable[..., Mismatch], truncated: list[Trajectory]) -> None:
    found = study(truncated)
    assert found.gap.kl < NUMERICS
    # What the parameters keep of the trainer's probabilities is what the engine kept.
    anew = next(f for f in found.tried if f.how.startswith("the trainer inside what top-k"))
    assert anew.gap.max_abs < 1e-5
    assert dict(found.handled)["the sampling mask"].kl > 100 * NUMERICS


@pytest.mark.parametrize("plant", ["mask", "mask and the values without it"])
def test_a_dropped_mask(study: Callable[..., Mismatch], truncated: list[Trajectory], plant: str) -> None:
    def dropped(t: Trajectory) -> Trajectory:
        t = dataclasses.replace(t, sampling_mask=None)
        if plant == "mask":
            return t
        assert t.support_logprobs is not None
        return dataclasses.replace(t, logprobs=t.support_logprobs, support_logprobs=None)

    found = study([dropped(t) for t in truncated])
    first(found, "truncation")
    assert any(u.cause == "truncation" and "no mask is recorded" in u.why for u in found.unknown)


def test_two_causes_at_once_are_both_named_and_the_rest_is_small(
    study: Callable[..., Mismatch], truncated: list[Trajectory]
) -> None:
    """Rows of one layer shifted and the mask dropped: neither alone explains all, both together do."""

    def both(t: Trajectory) -> Trajectory:
        rows = np.asarray(t.routing_experts).copy()
        rows[:, 2] = np.roll(rows[:, 2], 1, axis=0)
        return dataclasses.replace(with_rows(t, rows), sampling_mask=None)

    found = study([both(t) for t in truncated])
    assert [s.cause for s in found.steps] in (["truncation", "rows"], ["rows", "truncation"])
    assert found.rest is not None and found.rest.kl < 1e-3 * found.gap.kl
    assert max(f.share for f in found.findings) < 0.99
