"""Families of experts served by a real engine, before and after updates from a trainer of four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_asyncrl.models.layout import Layout
from tests.checkpoint.models import changed_copy
from tests.engines.fixtures import EngineHouse, Key, TestEngine
from tests.engines.models import Reference
from tests.engines.sampling import generate, least_shifted, other_rows, requests, worst
from tests.pool.pool import WorkerPool
from tests.weights.support import member

TOLERANCE = 1e-5
PLANTED = 100 * TOLERANCE
EP2_PP2 = Layout(ep=2, pp=2, dp=2)
JOBS = "tests.weights.jobs:"


@pytest.fixture(scope="module", params=["mixtral", "glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss"])
def served(request: pytest.FixtureRequest, engines: EngineHouse) -> Iterator[TestEngine]:
    """One server a family, which ends after its tests: nobody else asks for it."""
    key = Key(request.param, 1, 1, 0)
    yield engines.get(key)
    engines.end(key)


def test_it_equals_transformers(served: TestEngine) -> None:
    batch = requests(24, vocabulary=521)
    done = generate(served, batch)
    assert float(served.reference.logits(list(range(4, 60))).std()) >= 1.0
    assert worst(served.reference, batch, done) <= TOLERANCE
    assert least_shifted(served.reference, batch, done) >= PLANTED
    assert other_rows(served.reference, batch, done) == 0
    assert other_rows(served.reference, batch, done, roll=1) > 100


def test_it_does_so_behind_a_cached_prefix(served: TestEngine) -> None:
    """A prompt that continues another one's: its first keys are read from the cache, not computed."""
    (first,) = requests(1, tokens=4, seed=7, vocabulary=521)
    (told,) = generate(served, [first])
    (second,) = requests(1, tokens=8, seed=8, vocabulary=521)
    longer = type(second)(
        rid=second.rid,
        input_ids=[*map(int, first.input_ids), *map(int, told.output_ids), *map(int, second.input_ids)],
        sampling=second.sampling,
        version=-1,
        ignore_eos=True,
    )
    (done,) = generate(served, [longer])
    assert done.cached_tokens >= len(first.input_ids)
    assert worst(served.reference, [longer], [done]) <= TOLERANCE
    assert other_rows(served.reference, [longer], [done]) == 0


@pytest.mark.parametrize("served", ["gpt_oss"], indirect=True)
def test_windows_survive_that_slots_are_used_again(served: TestEngine) -> None:
    """More tokens than the cache holds. SGLang's own pool for windowed layers is wrong then, and seems right before."""
    slots = 32768
    for seed in range(2):
        batch = requests(60, tokens=4, seed=seed, vocabulary=521, longest=1000)
        assert sum(len(r.input_ids) for r in batch) > slots * 0.8
        done = generate(served, batch)
        some = slice(None, None, 20)
        assert worst(served.reference, batch[some], done[some]) <= TOLERANCE


def test_updates_from_megatron_arrive_whole(served: TestEngine, pool: WorkerPool, tmp_path: Path) -> None:
    """The weights as they are, changed ones, and a swap of two experts that must show.

    Buckets are so small that every layer is cut into several.
    """

    def trainer(job: str, **arguments: object) -> object:
        return pool.run(JOBS + job, layout=EP2_PP2, timeout_s=90.0, **arguments)

    spread = {"hf_dir": str(served.model), "bucket_bytes": 1 << 14}
    trainer("start", members=[member(served.name, served.url)], **spread)
    try:
        reference = served.reference
        for version in range(2):
            if version:
                trainer("perturb", step=1, scale=0.05)
            (report, *_) = trainer("publish", version=version)  # type: ignore[misc]
            assert report.get("engines") == (served.name,) and report["buckets"] > 20, report
            old = reference
            if version:
                trainer("export", out=str(tmp_path / "changed"))
                reference = Reference(with_rounded_sinks(tmp_path / "changed", tmp_path / "served"))
            batch = requests(12, seed=version, version=version, vocabulary=521)
            done = generate(served, batch)
            assert all(set(c.versions.tolist()) == {version} for c in done)
            assert worst(reference, batch, done) <= TOLERANCE
            assert other_rows(reference, batch, done) == 0
        assert worst(old, batch, done) >= PLANTED
        assert other_rows(old, batch, done) > 0
        stale = with_old_bias(reference.path, served.model, tmp_path / "stale")
        if stale is not None:
            assert other_rows(stale, batch, done) > 0
        trainer("swap_experts")
        trainer("publish", version=2)
        batch = requests(12, version=2, vocabulary=521)
        assert worst(reference, batch, generate(served, batch)) >= PLANTED
    finally:
        trainer("stop")


def with_rounded_sinks(changed: Path, target: Path) -> Path:
    """SGLang keeps sinks in bfloat16, whatever it is sent."""

    def keep(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: value.bfloat16().float() for name, value in tensors.items() if name.endswith(".sinks")})

    return changed_copy(changed, target, keep)


def with_old_bias(changed: Path, old: Path, target: Path) -> Reference | None:
    """What transformers says of the changed weights with the expert bias of before; None where there is none."""
    weights = load_file(old / "model.safetensors")
    before = {name: value for name, value in weights.items() if name.endswith("e_score_correction_bias")}
    if not before:
        return None

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        assert not any(torch.equal(tensors[name], value) for name, value in before.items())
        tensors.update(before)

    return Reference(changed_copy(changed, target, restore))
