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
from tests.engines.fixtures import EngineHouse, Key, TestEngine
from tests.engines.models import Reference
from tests.pool.pool import WorkerPool
from tests.weights.support import member

EP2_PP2 = Layout(ep=2, pp=2, dp=2)
TP2_EP2 = Layout(tp=2, ep=2, dp=2)
ETP2_EP2 = Layout(tp=2, ep=2, etp=2, dp=2)
VPP2 = Layout(pp=2, vpp=2, dp=2, ep=2)
TWO_RANKS = Key("qwen3_moe", 2, 2, 0)
TOLERANCE = 1e-5
PLANTED = 100 * TOLERANCE
PROMPTS = ([5, 9, 33, 80, 101, 7, 8], [400, 3, 17, 256, 99], [11] * 12)
JOBS = "tests.weights.jobs:"

Trainer = Callable[..., Any]


@pytest.fixture
def engines_two(engine: Callable[..., TestEngine], engines: EngineHouse) -> Iterator[tuple[TestEngine, TestEngine]]:
    """Two resident servers of one model, of one rank and of two, with their first weights before and after."""
    engines.begin(TWO_RANKS)
    pair = (engine(), engine(tp=2, ep=2))
    for one in pair:
        one.reset()
    yield pair
    for one in pair:
        one.reset()


@pytest.fixture
def trainer(pool: WorkerPool) -> Iterator[Trainer]:
    """`trainer(job, **arguments)` runs a job of `tests.weights.jobs` on the four ranks."""
    used = [EP2_PP2]

    def run(job: str, *, timeout_s: float = 120.0, layout: Layout | None = None, **arguments: Any) -> list[Any]:
        used[0] = layout or used[0]
        return pool.run(JOBS + job, layout=used[0], timeout_s=timeout_s, **arguments)

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


def checksum(engine: TestEngine) -> str:
    """Of the weights that it serves."""

    async def ask() -> str:
        async with engine.client() as client:
            return await client.checksum(deadline_s=60)

    return asyncio.run(ask())


CASES = {
    "broadcast": (EP2_PP2, {}, 1 << 18),
    "direct": (TP2_EP2, {"transport": "direct", "delta": "auto"}, 1 << 18),
    # Fused tensors are larger than such a bucket (fault 12).
    "shared_memory": (VPP2, {"transport": "shared_memory", "delta": "auto", "roots_per_stage": 1}, 1 << 14),
    # Each expert is cut over two ranks (fault 17).
    "disk": (ETP2_EP2, {"transport": "disk", "depth": 3}, 1 << 16),
}


@pytest.mark.parametrize("case", CASES)
def test_every_update_equals_transformers_on_the_exported_weights(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], tmp_path: Path, case: str
) -> None:
    """Unchanged weights, changed ones, a few changed elements, a planted error; and deltas bit by bit."""
    layout, weights, bucket_bytes = CASES[case]
    first, transport = engines_two[0], weights.get("transport", "broadcast")
    events = tmp_path / "events.jsonl"
    given = {"hf_dir": str(first.model), "members": members_of(engines_two), "folder": str(tmp_path / "weights")}
    trainer("start", layout=layout, weights=weights, bucket_bytes=bucket_bytes, events=str(events), **given)
    reports = trainer("publish", version=0)
    # Engines that have had no update yet take no slices.
    assert reports[0].get("transport") in ("broadcast", transport) and not reports[0]["delta"], reports[0]
    # The start-up path and the update path must lead to the same weights (fault 18).
    assert max(deviation(one, first.reference, 0) for one in engines_two) <= TOLERANCE
    reference = first.reference
    for version, change in enumerate(("perturb", "nudge"), 1):
        trainer(change, step=version)
        reports = trainer("publish", version=version)
        expected = tuple(sorted(one.name for one in engines_two))
        assert all(r["engines"] == expected and r["lost"] == {} for r in reports), reports
        assert reports[0]["transport"] == transport
        assert reports[0]["buckets"] > 4 or reports[0]["delta"]
        assert reports[0]["delta"] == (change == "nudge" and "delta" in weights), reports[0]
        trainer("export", out=str(tmp_path / f"v{version}"))
        old, reference = reference, Reference(tmp_path / f"v{version}")
        for one in engines_two:
            assert deviation(one, reference, version) <= TOLERANCE
            assert version > 1 or deviation(one, old, version) >= PLANTED
    if reports[0]["delta"]:
        assert 0 < reports[0]["changed"] < 0.05
        changed = [checksum(one) for one in engines_two]
        trainer("forget")
        assert not trainer("publish", version=3)[0]["delta"]
        assert [checksum(one) for one in engines_two] == changed
    trainer("swap_experts")
    trainer("publish", version=4)
    assert min(deviation(one, reference, 4) for one in engines_two) >= PLANTED
    spans = [record["span"] for record in read_jsonl(events)]
    assert spans.count("update") == spans.count("pause") == len(trainer("commits")[0])


@pytest.mark.parametrize("interrupt", ["in_flight", "retract"])
def test_requests_in_flight_survive_and_tell_both_versions(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], interrupt: str
) -> None:
    """More requests than the engines run at once (64), and updates among them: none is aborted (faults 9, 10)."""
    first = engines_two[0]
    members = members_of(engines_two)
    trainer("start", hf_dir=str(first.model), members=members, weights={"interrupt": interrupt})
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
        assert all(len(c.output_ids) == 150 for c in completions)
        assert any(c.retractions for c in completions) == (interrupt == "retract")
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
    assert "has to be paused" in reports[0]["lost"][bad.name]
    assert reports[0]["took"] < 20, "nobody may wait for the time limit of the broadcast"
    assert trainer("commits")[0] == [(0, (good.name,), (bad.name,))]
    trainer("export", out=str(tmp_path / "out"))
    assert deviation(good, Reference(tmp_path / "out"), 0) <= TOLERANCE
    # It stays out while it lives, and comes back with its next life and all weights.
    assert trainer("publish", version=1)[0]["engines"] == (good.name,)
    back = member("back", bad.url, incarnation=1, world_size=bad.world_size)
    trainer("set_members", members=[*members_of([good]), back])
    assert trainer("publish", version=2)[0]["engines"] == ("back", good.name)
    assert max(deviation(one, Reference(tmp_path / "out"), 2) for one in engines_two) <= TOLERANCE


def test_an_engine_that_comes_late_is_served_by_another_one_and_then_killed_in_an_update(
    trainer: Trainer, engine: Callable[..., TestEngine], engines: EngineHouse, tmp_path: Path
) -> None:
    """The trainer does nothing for it meanwhile. Needs a server of its own, since it is killed (fault 5)."""
    engines.begin(Key("qwen3_moe", 1, 1, 2))
    good = engine()
    good.reset()
    trainer("start", hf_dir=str(good.model), members=members_of([good]), joiners=True, weights={"delta": "auto"})
    trainer("perturb", step=1)
    trainer("publish", version=0)
    late = engine(index=2)
    faulty = {"kinds": {late.name: "dying"}, "pids": {late.name: late.server.pid}}
    trainer("set_members", members=members_of([good, late]), **faulty)
    (commits,) = [c for c in trainer("wait_for_commits", count=2) if c]
    assert commits[-1] == (0, (good.name, late.name), ())
    trainer("export", out=str(tmp_path / "out"))
    reference = Reference(tmp_path / "out")
    assert max(deviation(one, reference, 0) for one in (good, late)) <= TOLERANCE
    assert checksum(good) == checksum(late)
    trainer("nudge", step=2)
    reports = trainer("publish", version=1)
    assert reports[0]["engines"] == (good.name,) and late.name in reports[0]["lost"], reports[0]
    assert "cannot be reached" in reports[0]["lost"][late.name] and reports[0]["took"] < 20
    trainer("export", out=str(tmp_path / "after"))
    assert deviation(good, Reference(tmp_path / "after"), 1) <= TOLERANCE
    report = trainer("publish", version=2)[0]
    assert report["engines"] == (good.name,) and report["lost"] == {} and report["took"] < 10
    good.reset()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("absent", "did not join the update group within 3 s"), ("lying", "received other messages than were sent")],
)
def test_an_engine_that_does_not_play_along_is_named(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine], kind: str, reason: str
) -> None:
    """It never joins the group, or it answers success without having the version."""
    good, bad = engines_two
    trainer("start", hf_dir=str(good.model), members=members_of(engines_two), kinds={bad.name: kind}, step_s=3.0)
    reports = trainer("publish", version=0)
    assert reports[0]["engines"] == (good.name,) and reason in reports[0]["lost"][bad.name], reports[0]
    assert reports[0]["took"] < 30


def test_opposite_orders_of_joining_do_not_lock_each_other(
    trainer: Trainer, engines_two: tuple[TestEngine, TestEngine]
) -> None:
    """Two pipeline stages, two engines; each engine in turn comes late, and the group is formed anew each time."""
    members = members_of(engines_two)
    for version, late in enumerate(itertools.chain(engines_two, engines_two)):
        trainer("start", hf_dir=str(engines_two[0].model), members=members, kinds={late.name: "slow"})
        reports = trainer("publish", version=version)
        assert len(reports[0]["engines"]) == 2 and reports[0]["took"] < 20, reports[0]


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
