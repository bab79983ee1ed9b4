"""Replay on real routers: what the sampler used is what the trainer uses, on every layout."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.completion import GenerateRequest
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.batch import Sample
from tests.engines.fixtures import TestEngine
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.replay.jobs import Seen, experts_of

LAYOUTS = [
    pytest.param(Layout(), "off", id="one"),
    pytest.param(Layout(), "full", id="one-recomputed"),
    pytest.param(Layout(dp=2, ep=2), "full", id="ep2-recomputed"),
    pytest.param(Layout(pp=2), "full", id="pp2-recomputed"),
    pytest.param(Layout(tp=2), "off", id="tp2"),
    pytest.param(Layout(pp=2, dp=2, ep=2), "full", id="ep2pp2-recomputed"),
]


def sample_from(engine: TestEngine, count: int = 14) -> list[Sample]:
    """Real completions of a real engine, of uneven lengths, as training samples."""
    draw = np.random.default_rng(3)
    batch = [
        GenerateRequest(
            rid=f"replay-{i}",
            input_ids=draw.integers(4, 512, size=int(draw.integers(1, 12))),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=int(draw.integers(2, 14))),
            version=-1,
            ignore_eos=True,
        )
        for i in range(count)
    ]

    async def go() -> list[Sample]:
        async with engine.client() as client:
            done = await client.generate(batch, deadline_s=120)
        made = []
        for request, c in zip(batch, done, strict=True):
            prompt = np.asarray(request.input_ids, dtype=np.int32)
            trained = np.concatenate([np.zeros(len(prompt), bool), np.ones(len(c.output_ids), bool)])
            logprobs = np.concatenate([np.full(len(prompt), np.nan, np.float32), c.logprobs])
            made.append(
                Sample(
                    name=request.rid,
                    tokens=np.concatenate([prompt, c.output_ids]),
                    trained=trained,
                    weight=1.0 / 100,
                    advantage=float(draw.normal()),
                    sampler_logprobs=logprobs,
                    experts=c.experts,
                )
            )
        return made

    return asyncio.run(go())


@pytest.fixture(scope="module")
def sampled(engine: Callable[..., TestEngine]) -> tuple[TestEngine, list[Sample]]:
    """One list of real samples for the whole file."""
    found = engine()
    found.reset()
    return found, sample_from(found)


def merged(results: list[dict[str, object]]) -> Seen:
    """What all ranks saw."""
    seen: Seen = {}
    for r in results:
        for key, experts in r["seen"].items():  # type: ignore[attr-defined]
            seen.setdefault(key, []).extend(experts)
    return seen


@functools.cache
def layers_of(path: str) -> tuple[int, ...]:
    return ModelSpec.from_hf(path).moe_layer_indices


@pytest.mark.parametrize(("layout", "recompute"), LAYOUTS)
def test_with_moved_routers_the_replayed_experts_are_the_samplers(
    pool: WorkerPool, sampled: tuple[TestEngine, list[Sample]], layout: Layout, recompute: str
) -> None:
    engine, samples = sampled
    common = {"hf_dir": str(engine.model), "given": samples, "scale": 0.5}
    results = pool.run("tests.replay.jobs:replayed", layout=layout, recompute=recompute, **common)
    seen, layers = merged(results), layers_of(str(engine.model))
    for s in samples:
        assert s.experts is not None
        assert (experts_of(seen, s, layers) == np.sort(s.experts, -1)).all(), s.name
    gates = {layer: g for r in results for layer, g in r["gates"].items()}
    assert set(gates) == set(layers) and all(g > 0 for g in gates.values())
    decisions = sum(len(s.tokens) - 1 for s in samples) * len(layers)
    assert results[0]["sums"]["decisions"] == decisions
    # The witness can tell: without replay, the moved routers choose otherwise.
    if layout == Layout() and recompute == "off":
        live = pool.run("tests.replay.jobs:replayed", layout=layout, mode="off", **common)
        free = merged(live)
        differs = np.mean(
            [(experts_of(free, s, layers) != np.sort(s.experts, -1)).any(-1).mean() for s in samples]  # type: ignore[type-var]
        )
        assert differs > 0.2
        assert results[0]["sums"]["flipped"] > 0.2 * decisions


def test_gradients_through_replay_are_those_of_one_process(
    pool: WorkerPool, sampled: tuple[TestEngine, list[Sample]]
) -> None:
    engine, samples = sampled
    common = {"hf_dir": str(engine.model), "given": samples, "scale": 0.5}
    (one,) = pool.run("tests.replay.jobs:replayed", layout=Layout(), **common)
    two = pool.run("tests.replay.jobs:replayed", layout=Layout(dp=2, ep=2), **common)
    shifted = [dataclasses.replace(s, experts=np.roll(s.experts, 1, axis=1)) for s in samples]  # type: ignore[arg-type]
    (planted,) = pool.run("tests.replay.jobs:replayed", layout=Layout(), **{**common, "given": shifted})
    for layer, gate in one["gates"].items():
        assert two[0]["gates"][layer] == pytest.approx(gate, rel=1e-5)
    assert two[0]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert abs(planted["loss"] - one["loss"]) > 1e-3 * abs(one["loss"])


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        ("range", r"trajectory replay-3, row 0, MoE layer 1, rank 0: .*outside \[0, 8\)"),
        ("twice", r"trajectory replay-3, row 0, MoE layer 1, rank 0: .*twice"),
        ("short", r"trajectory replay-3, rank 0: routing rows"),
        ("missing", r"replay-3.*missing.*allow_missing"),
    ],
)
def test_a_row_that_does_not_fit_stops_the_step_with_its_name(
    pool: WorkerPool, sampled: tuple[TestEngine, list[Sample]], plant: str, message: str
) -> None:
    engine, samples = sampled
    experts = samples[3].experts
    assert experts is not None
    bad, known = experts.copy(), None
    if plant == "range":
        bad[0, 1, 0] = 9
    elif plant == "twice":
        bad[0, 1] = 4
    elif plant == "short":
        bad = bad[:-1]
    else:
        known = np.ones(len(bad), bool)
        known[0] = False
    given = [*samples[:3], dataclasses.replace(samples[3], experts=bad, known=known), *samples[4:]]
    with pytest.raises(WorkerFailed, match=message):
        pool.run("tests.replay.jobs:replayed", layout=Layout(), hf_dir=str(engine.model), given=given)


def test_missing_rows_are_routed_live_only_with_permission_and_are_counted(
    pool: WorkerPool, sampled: tuple[TestEngine, list[Sample]]
) -> None:
    engine, samples = sampled
    experts = samples[3].experts
    assert experts is not None
    known = np.ones(len(experts), bool)
    known[1] = False
    # Zeros stand where rows are missing; they must never be taken for expert 0.
    holed = np.where(known[:, None, None], experts, 0).astype(experts.dtype)
    given = [*samples[:3], dataclasses.replace(samples[3], experts=holed, known=known), *samples[4:]]
    (found,) = pool.run(
        "tests.replay.jobs:replayed", layout=Layout(), hf_dir=str(engine.model), given=given, allow_missing=True
    )
    assert found["sums"]["missing"] == len(layers_of(str(engine.model)))
    # The weights are those that sampled, so the live choice is the sampler's.
    assert (experts_of(found["seen"], samples[3], layers_of(str(engine.model))) == np.sort(experts, -1)).all()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(), id="one"),
        pytest.param(Layout(dp=2, ep=2), id="ep2"),
        pytest.param(Layout(pp=2, dp=2, ep=2), id="ep2pp2"),
        pytest.param(Layout(tp=2), id="tp2"),
    ],
)
def test_with_replay_the_trainers_logprobs_are_the_samplers(
    pool: WorkerPool, sampled: tuple[TestEngine, list[Sample]], layout: Layout
) -> None:
    engine, samples = sampled

    def worst(given: list[Sample]) -> float:
        found = pool.run(
            "tests.replay.jobs:scored", layout=layout, hf_dir=str(engine.model), given=given, mode="replay"
        )
        return max(
            float(np.abs(ours[s.trained] - s.sampler_logprobs[s.trained]).max())  # type: ignore[index]
            for s, ours in zip(samples, found[0], strict=True)
        )

    assert worst(samples) <= 1e-5
    # Planted: every layer takes the rows of the layer before it.
    shifted = [dataclasses.replace(s, experts=np.roll(s.experts, 1, axis=1)) for s in samples]  # type: ignore[arg-type]
    assert worst(shifted) >= 1e-3
