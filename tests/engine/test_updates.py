"""Versions, pauses, aborts and weight updates on a running engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import numpy as np
import psutil
import pytest

from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.engine.errors import EngineRefused, EngineTimeout
from tests.engines.fixtures import EngineHouse, TestEngine
from tests.engines.models import Reference, make_model

TOLERANCE = 1e-5
COUNTER = itertools.count()


@pytest.fixture(scope="module")
def other(engines: EngineHouse, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same architecture with other weights."""
    return Reference(make_model("qwen3_moe", tmp_path_factory.mktemp("other") / "model", seed=1))


def request(tokens: int, *, version: int = -1, prompt: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest(
        rid=f"updates-{next(COUNTER)}",
        input_ids=prompt or [5, 9, 33, 80, 101, 7, 8],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens),
        version=version,
        ignore_eos=True,
    )


def run(engine: TestEngine, body: Callable[[EngineClient], Awaitable[Completion]]) -> Completion:
    async def go() -> Completion:
        async with engine.client() as client:
            return await body(client)

    return asyncio.run(go())


async def busy(client: EngineClient, tokens: int) -> tuple[GenerateRequest, asyncio.Task[list[Completion]]]:
    """A long request that has surely begun."""
    asked = request(tokens)
    task = asyncio.create_task(client.generate([asked], deadline_s=120))
    await asyncio.sleep(0.5)
    assert not task.done()
    return asked, task


def deviation(reference: Reference, r: GenerateRequest, c: Completion) -> np.ndarray:
    return np.abs(reference.logprobs(r.input_ids, c.output_ids) - c.logprobs)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_versions_switch_where_the_weights_did(fresh: TestEngine, other: Reference, mode: str) -> None:
    """A request that lives through an update. Read after the reply, the version would be wrong for its first tokens."""

    async def body(client: EngineClient) -> Completion:
        _, task = await busy(client, 400)
        await client.pause(mode=mode, deadline_s=20)
        await client.load_weights(str(other.path), 7, flush=mode == "retract", deadline_s=60)
        await client.resume(deadline_s=20)
        (done,) = await task
        assert await client.serving_version(deadline_s=20) == 7
        return done

    done = run(fresh, body)
    assert done.finish_reason == "length" and len(done.output_ids) == 400
    switch = int((done.versions == -1).sum())
    assert 0 < switch < 400
    assert (done.versions[:switch] == -1).all() and (done.versions[switch:] == 7).all()
    r = request(400)
    old, new = deviation(fresh.reference, r, done), deviation(other, r, done)
    assert old[:switch].max() <= TOLERANCE
    assert np.median(old[switch:]) >= 100 * TOLERANCE
    assert done.experts is not None and len(done.experts) == 7 + 400 - 1
    rows = 7 + switch - 1
    ids = [*map(int, r.input_ids), *done.output_ids.tolist()][:-1]
    # Either way the rows recorded at sampling stay, and the engine says which weights made each.
    assert (done.experts[:rows] == fresh.reference.experts(ids)[:rows]).all()
    assert done.row_runs is not None
    said = [(r.start, r.end, r.version, r.source) for r in done.row_runs]
    assert said == [(0, 7, -1, "prefilled"), (7, rows, -1, "sampled"), (rows, len(ids), 7, "sampled")]
    if mode == "retract":
        # Everything was prefilled again: the later tokens are the new weights' own, and so are their rows (fault 25).
        assert done.retractions >= 1
        assert new[switch:].max() <= TOLERANCE
        assert (done.experts[rows:] == other.experts(ids)[rows:]).all()
        assert (other.experts(ids)[:rows] != done.experts[:rows]).any()
    else:
        # Keys stay, so the earlier rows are the old weights', and the later tokens are neither model's alone.
        assert done.retractions == 0
        assert np.median(new[switch:]) >= 100 * TOLERANCE
    assert (done.experts != fresh.reference.experts(ids)).any()


def test_naming_a_version_aborts_nothing(fresh: TestEngine) -> None:
    """The engine's own default would abort every running request."""

    async def body(client: EngineClient) -> Completion:
        _, task = await busy(client, 300)
        await client.set_version(3, deadline_s=20)
        return (await task)[0]

    done = run(fresh, body)
    assert done.finish_reason == "length" and len(done.output_ids) == 300
    assert set(done.versions.tolist()) == {-1, 3}

    async def with_default(client: EngineClient) -> Completion:
        _, task = await busy(client, 300)
        await client._post("/update_weight_version", {"new_version": "4", "abort_all_requests": True}, 20, "planted")
        return (await task)[0]

    assert run(fresh, with_default).finish_reason == "abort"


@pytest.mark.parametrize("how", ["rid", "all", "pause"])
def test_abort_keeps_what_was_sampled(fresh: TestEngine, how: str) -> None:
    async def body(client: EngineClient) -> Completion:
        asked, task = await busy(client, 900)
        if how == "pause":
            await client.pause(mode="abort", deadline_s=20)
        else:
            await client.abort(asked.rid if how == "rid" else None, deadline_s=20)
        (done,) = await task
        await client.resume(deadline_s=20)
        return done

    done = run(fresh, body)
    assert done.finish_reason == "abort" and 0 < len(done.output_ids) < 900
    assert done.experts is not None and len(done.experts) == 7 + len(done.output_ids) - 1
    assert deviation(fresh.reference, request(1), done).max() <= TOLERANCE


def test_prefixes_are_shared_within_a_version_only(fresh: TestEngine) -> None:
    prompt = list(range(10, 74))

    async def body(client: EngineClient) -> Completion:
        async def cached(version: int) -> int:
            (done,) = await client.generate([request(2, version=version, prompt=prompt)], deadline_s=60)
            return done.cached_tokens

        assert await cached(20) == 0
        assert await cached(20) == len(prompt) - 1
        assert await cached(21) == 0
        assert await cached(20) == len(prompt) - 1
        return (await client.generate([request(2, prompt=prompt)], deadline_s=60))[0]

    run(fresh, body)


def test_deadline_of_a_paused_engine_names_what_was_waited_for(fresh: TestEngine) -> None:
    async def body(client: EngineClient) -> Completion:
        await client.pause(mode="in_place", deadline_s=20)
        with pytest.raises(EngineTimeout, match=r"qwen3_moe.*waited 0\.5 s for 1 completions"):
            await client.generate([request(4)], deadline_s=0.5)
        await client.check_scheduler(deadline_s=20)
        await client.resume(deadline_s=20)
        # The request that nobody waits for any more does not come back to life.
        return (await client.generate([request(4)], deadline_s=60))[0]

    assert len(run(fresh, body).output_ids) == 4


def test_a_paused_engine_leaves_the_core_to_the_trainer(fresh: TestEngine) -> None:
    """Without our hook its scheduler polls: the processor time of the whole pause, on a machine that has it to give."""

    def used() -> float:
        family = psutil.Process(fresh.server.pid).children(recursive=True)
        return sum(p.cpu_times().user + p.cpu_times().system for p in family)

    async def body(client: EngineClient) -> Completion:
        _, task = await busy(client, 300)
        await client.pause(mode="in_place", deadline_s=20)
        before, began = used(), time.monotonic()
        await asyncio.sleep(2.0)
        assert used() - before <= 0.2 * (time.monotonic() - began)
        await client.resume(deadline_s=20)
        return (await task)[0]

    done = run(fresh, body)
    assert done.finish_reason == "length" and len(done.output_ids) == 300


def test_refusals_carry_the_engines_reason(fresh: TestEngine) -> None:
    async def body(client: EngineClient) -> Completion:
        with pytest.raises(EngineRefused, match="context length"):
            await client.generate([request(4, prompt=[5] * 2000)], deadline_s=60)
        with pytest.raises(EngineRefused, match="does-not-exist"):
            await client.load_weights("does-not-exist", 1, flush=False, deadline_s=60)
        return (await client.generate([request(4)], deadline_s=60))[0]

    done = run(fresh, body)
    assert deviation(fresh.reference, request(1), done).max() <= TOLERANCE
