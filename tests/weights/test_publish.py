"""Updates from a trainer of four ranks to two real engines: values against transformers, and the faults on the way."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_asyncrl.data.messages import Member
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.telemetry.jsonl import read_jsonl
from tests.engines.fixtures import EngineHouse, TestEngine
from tests.engines.models import Reference
from tests.pool.pool import WorkerPool
from tests.weights.support import member

EP2_PP2 = Layout(ep=2, pp=2, dp=2)
TOLERANCE = 1e-5
PLANTED = 100 * TOLERANCE
PROMPTS = ([5, 9, 33, 80, 101, 7, 8], [400, 3, 17, 256, 99], [11] * 12)
JOBS = "tests.weights.jobs:"

Trainer = Callable[..., Any]


@pytest.fixture
def engines_two(engine: Callable[..., TestEngine], engines: EngineHouse) -> Iterator[tuple[TestEngine, TestEngine]]:
    """Two resident servers of one model, with their first weights before and after."""
    from tests.engines.fixtures import Key

    engines.begin(Key("qwen3_moe", 1, 1, 1))
    pair = (engine(), engine(index=1))
    for one in pair:
        one.reset()
    yield pair
    for one in pair:
        one.reset()


@pytest.fixture
def trainer(pool: WorkerPool) -> Iterator[Trainer]:
    """`trainer(job, **arguments)` runs a job of `tests.weights.jobs` on the four ranks."""

    def run(job: str, *, timeout_s: float = 90.0, **arguments: Any) -> list[Any]:
        return pool.run(JOBS + job, layout=EP2_PP2, timeout_s=timeout_s, **arguments)

    yield run
    run("stop")


def members_of(pair: Sequence[TestEngine]) -> list[Member]:
    return [member(one.name, one.url, world_size=one.world_size) for one in pair]


def sample(engine: TestEngine, version: int, *, tokens: int = 12) -> list[Completion]:
    """Completions of the fixed prompts."""
    return asyncio.run(_generate(engine, PROMPTS, version, tokens))


async def _generate(
    engine: TestEngine, prompts: Sequence[Sequence[int]], version: int, tokens: int
) -> list[Completion]:
    requests = [
        GenerateRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(prompt),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens),
            version=version,
            ignore_eos=True,
        )
        for prompt in prompts
    ]
    async with engine.client() as client:
        return await client.generate(requests, deadline_s=120)


def deviation(engine: TestEngine, reference: Reference, version: int) -> float:
    """Largest difference of log-probabilities from transformers, over tokens that `version` sampled."""
    worst = 0.0
    for prompt, completion in zip(PROMPTS, sample(engine, version), strict=True):
        assert set(completion.versions.tolist()) == {version}
        expected = reference.logprobs(prompt, completion.output_ids.tolist())
        worst = max(worst, float(np.abs(completion.logprobs - expected).max()))
    return worst


def test_every_update_equals_transformers_on_the_exported_weights(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], tmp_path: Path
) -> None:
    """Five updates with changed weights; before them one with unchanged weights, after them two planted errors."""
    first = engines_two[0]
    events = tmp_path / "events.jsonl"
    before = [deviation(one, first.reference, -1) for one in engines_two]
    trainer("start", hf_dir=str(first.model), members=members_of(engines_two), events=str(events))
    trainer("publish", version=0)
    # The start-up path and the update path must lead to the same weights.
    assert max(before + [deviation(one, first.reference, 0) for one in engines_two]) <= TOLERANCE
    reference = first.reference
    for version in range(1, 6):
        trainer("perturb", step=version)
        reports = trainer("publish", version=version)
        assert all(r["engines"] == tuple(sorted(one.name for one in engines_two)) for r in reports), reports
        assert reports[0]["buckets"] > 4 and reports[0]["lost"] == {}
        trainer("export", out=str(tmp_path / f"v{version}"))
        old, reference = reference, Reference(tmp_path / f"v{version}")
        for one in engines_two:
            assert deviation(one, reference, version) <= TOLERANCE
            assert deviation(one, old, version) >= PLANTED
    plants: list[dict[str, Any]] = [{"job": "swap_experts"}, {"job": "age_expert", "step": 5}]
    for number, plant in enumerate(plants):
        trainer(**plant)
        trainer("publish", version=6 + number)
        assert min(deviation(one, reference, 6 + number) for one in engines_two) >= PLANTED, plant
        if plant["job"] == "swap_experts":
            trainer(**plant)
    assert [c[0] for c in trainer("commits")[0]] == list(range(8))
    spans = [record["span"] for record in read_jsonl(events)]
    assert spans.count("update") == spans.count("pause") == 8


def test_requests_in_flight_survive_and_tell_both_versions(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine]
) -> None:
    """More requests than the engines run at once (64), and updates among them: none is aborted or retracted."""
    first = engines_two[0]
    trainer("start", hf_dir=str(first.model), members=members_of(engines_two))
    trainer("publish", version=0)
    prompts = [[3 + i, 8, 15] for i in range(96)]
    done: dict[str, list[Completion]] = {}

    def generate(one: TestEngine) -> None:
        done[one.name] = asyncio.run(_generate(one, prompts, 0, 150))

    threads = [threading.Thread(target=generate, args=(one,)) for one in engines_two]
    for thread in threads:
        thread.start()
    for version in (1, 2):
        trainer("perturb", step=version)
        reports = trainer("publish", version=version)
        assert len(reports[0]["engines"]) == 2, reports
    for thread in threads:
        thread.join(120)
    for one in engines_two:
        completions = done[one.name]
        assert {c.finish_reason for c in completions} == {"length"}
        assert all(len(c.output_ids) == 150 and c.retractions == 0 for c in completions)
        assert all(np.all(np.diff(c.versions) >= 0) for c in completions)
        assert max(len(set(c.versions.tolist())) for c in completions) >= 2


def test_an_engine_that_refuses_is_left_out_at_once(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], tmp_path: Path
) -> None:
    """The engine answers an error while the trainer is inside the broadcast. The other one gets the whole update."""
    good, bad = engines_two
    trainer("start", hf_dir=str(good.model), members=members_of(engines_two), kinds={bad.name: "refusing"})
    trainer("perturb", step=1)
    reports = trainer("publish", version=0)
    assert reports[0]["engines"] == (good.name,) and reports[0] | {"took": 0} == reports[3] | {"took": 0}
    assert "begin_weight_update" in reports[0]["lost"][bad.name]
    assert reports[0]["took"] < 10, "nobody may wait for the time limit of the broadcast"
    assert trainer("commits")[0] == [(0, (good.name,), (bad.name,))]
    trainer("export", out=str(tmp_path / "out"))
    assert deviation(good, Reference(tmp_path / "out"), 0) <= TOLERANCE
    # It stays out while it lives, and comes back with its next life.
    assert trainer("publish", version=1)[0]["engines"] == (good.name,)
    again = [member(good.name, good.url), member("back", bad.url, incarnation=1)]
    trainer("set_members", members=again)
    assert trainer("publish", version=2)[0]["engines"] == ("back", good.name)
    assert max(deviation(one, Reference(tmp_path / "out"), 2) for one in engines_two) <= TOLERANCE


def test_an_engine_killed_in_the_midst_of_an_update_is_left_out(
    trainer: Trainer, engine: Callable[..., TestEngine], engines: EngineHouse, tmp_path: Path
) -> None:
    """The next update's group does not count it. Needs a server of its own, since it is killed."""
    from tests.engines.fixtures import Key

    engines.begin(Key("qwen3_moe", 1, 1, 2))
    good, bad = engine(), engine(index=2)
    good.reset()
    faulty = {"kinds": {bad.name: "dying"}, "pids": {bad.name: bad.server.pid}}
    trainer("start", hf_dir=str(good.model), members=members_of((good, bad)), **faulty)
    trainer("perturb", step=1)
    reports = trainer("publish", version=0)
    assert reports[0]["engines"] == (good.name,) and bad.name in reports[0]["lost"], reports[0]
    assert "cannot be reached" in reports[0]["lost"][bad.name] and reports[0]["took"] < 15
    trainer("export", out=str(tmp_path / "out"))
    assert deviation(good, Reference(tmp_path / "out"), 0) <= TOLERANCE
    report = trainer("publish", version=1)[0]
    assert report["engines"] == (good.name,) and report["lost"] == {} and report["took"] < 5
    good.reset()


@pytest.mark.parametrize(
    ("kind", "reason"), [("absent", "did not join the update group within 3 s"), ("lying", "reports weight version")]
)
def test_an_engine_that_does_not_play_along_is_named(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], kind: str, reason: str
) -> None:
    """It never joins the group, or it answers success without having the version."""
    good, bad = engines_two
    trainer("start", hf_dir=str(good.model), members=members_of(engines_two), kinds={bad.name: kind}, step_s=3.0)
    reports = trainer("publish", version=0)
    assert reports[0]["engines"] == (good.name,) and reason in reports[0]["lost"][bad.name], reports[0]
    assert reports[0]["took"] < 20


def test_opposite_orders_of_joining_do_not_lock_each_other(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine]
) -> None:
    """Two pipeline stages, two engines; each engine in turn comes late, and the group is formed anew each time."""
    members = members_of(engines_two)
    for version, late in enumerate(itertools.chain(engines_two, engines_two)):
        trainer("start", hf_dir=str(engines_two[0].model), members=members, kinds={late.name: "slow"})
        reports = trainer("publish", version=version)
        assert len(reports[0]["engines"]) == 2 and reports[0]["took"] < 10, reports[0]


def test_all_ranks_raise_the_same_error(trainer: Trainer, engines_two: tuple[TestEngine, TestEngine]) -> None:
    """One rank cannot gather; or no engine is left. No rank hangs, and the engines are free for the next trainer."""
    first = engines_two[0]
    trainer("start", hf_dir=str(first.model), members=members_of(engines_two))
    trainer("publish", version=0)
    trainer("break_parameter", rank=2)
    errors = {r["error"] for r in trainer("publish", version=1)}
    assert len(errors) == 1 and "rank 2" in errors.pop()
    nobody = {"members": [], "start_timeout_s": 1.0, "expected": 1}
    trainer("start", hf_dir=str(first.model), **nobody)
    errors = {r["error"] for r in trainer("publish", version=1)}
    assert len(errors) == 1 and "waited 1 s for an engine" in errors.pop()
    trainer("start", hf_dir=str(first.model), members=members_of(engines_two))
    assert len(trainer("publish", version=2)[0]["engines"]) == 2
    assert max(deviation(one, first.reference, 2) for one in engines_two) <= TOLERANCE


def test_nothing_piles_up_over_many_updates(trainer: Trainer, engines_two: tuple[TestEngine, TestEngine]) -> None:
    """Sixty updates: no more files, threads or process groups, memory flat."""
    trainer("start", hf_dir=str(engines_two[0].model), members=members_of(engines_two), bucket_bytes=1 << 20)
    for held in trainer("publish_many", first=0, count=60, timeout_s=120):
        for what in ("fds", "threads", "python_threads", "groups"):
            assert held["after"][what] <= held["before"][what] + 1, (what, held)
        assert held["after"]["rss"] - held["before"]["rss"] < 40 * 2**20, held
