"""The rollout role against a real engine and the real buffer: what reaches the trainer, and how it ends."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.rollout.role import _run
from moe_asyncrl.telemetry.jsonl import read_jsonl
from tests.engines.fixtures import TestEngine
from tests.rollout.run import HandRun, hand_run, model_folder, recipe_for, write_jsonl

PROMPTS = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "kind": "sum"} for i in range(12)]
TOLERANCE = 1e-5


@pytest.fixture
def recipe(engine: Callable[..., TestEngine], tmp_path: pathlib.Path) -> Callable[..., Recipe]:
    model = model_folder(engine().model, tmp_path)
    train = write_jsonl(tmp_path / "train.jsonl", PROMPTS)

    def make(**sections: Any) -> Recipe:
        return recipe_for(model, train, **sections)

    return make


async def serve_version(engine: TestEngine, version: int) -> None:
    async with engine.client() as client:
        await client.set_version(version, deadline_s=20)


async def started(run: HandRun, r: Recipe, engine: TestEngine) -> asyncio.Task[int]:
    """The role, in a run whose version 0 is on the engine."""
    role = asyncio.create_task(_run(run.folder, r, 0))
    run.begin()
    run.join(engine)
    await serve_version(engine, 0)
    run.commit(0)
    return role


async def ends(role: asyncio.Task[int], deadline_s: float = 60.0) -> int:
    return await asyncio.wait_for(role, deadline_s)


async def evaluated(run: HandRun, version: int) -> None:
    async with asyncio.timeout(60):
        while version not in [e["version"] for e in lines(run, "eval")]:
            await asyncio.sleep(0.1)


def lines(run: HandRun, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(run.folder.metrics_path) if line["kind"] == kind]


def test_a_run_from_first_evaluation_to_last(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path
) -> None:
    held_out = write_jsonl(tmp_path / "eval.jsonl", PROMPTS[:5])
    r = recipe(data={"train": str(tmp_path / "train.jsonl"), "eval": str(held_out)}, eval={"every": 2})

    async def go() -> tuple[HandRun, list[list[list[Any]]]]:
        async with hand_run(tmp_path, r) as run:
            role = asyncio.create_task(_run(run.folder, r, 0))
            await asyncio.sleep(0.3)
            assert run.state().issued == 0  # the run has not begun: nothing is asked for
            run.begin()
            run.join(fresh)
            batches = []
            for version in range(3):
                await serve_version(fresh, version)
                run.commit(version)
                batches.append(await run.wait_take(version + 1, version))
                if version in (0, 2):
                    await evaluated(run, version)
            await serve_version(fresh, 3)
            run.commit(3)
            run.phase("finishing")
            assert await ends(role) == 0
            return run, batches

    run, batches = asyncio.run(go())

    evals = lines(run, "eval")
    assert [e["version"] for e in evals] == [0, 2, 3]  # before the first ticket, at a multiple of 2, at the end
    assert all(e["n"] == 5 and 0.0 <= e["accuracy"] <= 1.0 and e["failed"] == 0 for e in evals)
    state = run.state()
    assert state.issued == 0  # every ticket was used up or given back
    assert state.counters.failed == 0
    rollout = lines(run, "rollout")[-1]
    assert rollout["completions"] >= 3 * 4 * 4 and rollout["running_requests"] == 0
    events = list(read_jsonl(run.folder.events_path))
    spans = [e for e in events if e["span"] == "generate" and "tokens" in e]
    assert spans and all(e["engine"] == "engine-0" and e["requests"] % 4 == 0 and e["end"] > e["start"] for e in spans)

    indices = [g[0].identity.index for batch in batches for g in batch]
    assert len(set(indices)) == 12
    worst, planted = 0.0, np.inf
    for group in batches[0]:
        assert len(group) == 4 and len({t.tokens[: -int(t.loss_mask.sum())].tobytes() for t in group}) == 1
        for t in group:
            p = int((~t.loss_mask).sum())
            assert t.policy.base_version == 0 and set(t.weight_version[t.loss_mask].tolist()) == {0}
            assert t.identity.prompt.startswith(f"{tmp_path / 'train.jsonl'}:") and t.metadata["kind"] == "sum"
            assert t.rewards["total"] in (0.0, 1.0) and t.score_status["exact"].status == "ok"
            want = fresh.reference.logprobs(t.tokens[:p], t.tokens[p:])
            worst = max(worst, float(np.abs(want - t.logprobs[p:]).max()))
            if len(want) > 1:
                planted = min(planted, float(np.abs(want - np.roll(t.logprobs[p:], 1)).max()))
            assert t.routing_experts is not None
            np.testing.assert_array_equal(t.routing_experts, fresh.reference.experts(t.tokens[:-1]))
            assert {run.version for run in t.routing_runs} == {0}
            assert t.routing_runs[-1].source == ("sampled" if len(t.tokens) - 1 > p else "prefilled")
    assert worst < TOLERANCE
    assert planted > 100 * TOLERANCE  # log-probabilities shifted by one token would be seen


def test_weights_that_change_while_a_sample_grows_label_each_token(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path
) -> None:
    """Fault 38: the version that is read after the reply would label every token of such a sample with the new one."""
    r = recipe(rollout={"max_new_tokens": 60, "ignore_eos": True, "concurrent_groups": 4}, buffer={"max_staleness": 8})

    async def go() -> list[Any]:
        async with hand_run(tmp_path, r) as run:
            role = asyncio.create_task(_run(run.folder, r, 0))
            run.begin()
            run.join(fresh)
            found: list[Any] = []
            for version in range(40):
                await serve_version(fresh, version)
                run.commit(version)
                groups = await run.wait_take(version, version - 1) if version else []
                found += [t for g in groups for t in g if len(set(t.weight_version[t.loss_mask].tolist())) > 1]
                if len(found) >= 2:
                    break
                await run.until("a list under way", issued=4)
                await asyncio.sleep(0.2)
            run.phase("finishing")
            assert await ends(role) == 0
            return found

    found = asyncio.run(go())
    assert len(found) >= 2
    for t in found:
        p = int((~t.loss_mask).sum())
        sampled = t.weight_version[p:]
        assert (np.diff(sampled) >= 0).all() and len(sampled) == 60
        for rows in t.routing_runs:
            if rows.start >= p - 1:
                assert (t.weight_version[rows.start + 1 : rows.end + 1] == rows.version).all()
        # The label alone changed, not the weights: every log-probability must still be the model's.
        want = fresh.reference.logprobs(t.tokens[:p], t.tokens[p:])
        assert np.abs(want - t.logprobs[p:]).max() < TOLERANCE


def test_sigterm_gives_every_ticket_back(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path
) -> None:
    r = recipe(rollout={"max_new_tokens": 200, "ignore_eos": True})

    async def go() -> None:
        async with hand_run(tmp_path, r) as run:
            role = await started(run, r, fresh)
            await run.until("groups under way", issued=8)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await ends(role) == 0
            state = run.state()
            assert state.issued == 0 and state.held == 0 and state.counters.sampled == 0

    asyncio.run(go())


def test_one_odd_completion_does_not_end_the_run_and_is_not_a_zero(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "odd_reward.py").write_text(
        "def reward(prompt, completion, answer, metadata):\n"
        "    if len(completion) % 3 == 0:\n"
        "        raise ValueError('an odd one')\n"
        "    return {'length': len(completion), 'total': 1.0 + len(completion)}\n"
    )
    r = recipe(
        reward={"function": "odd_reward:reward", "folder": str(tmp_path)},
        rollout={"group_size": 6, "max_new_tokens": 6},
    )

    async def go() -> None:
        async with hand_run(tmp_path, r) as run:
            role = await started(run, r, fresh)
            groups = await run.wait_take(1, 0) + await run.wait_take(2, 0)
            run.phase("finishing")
            assert await ends(role) == 0
            assert any(len(g) < 6 for g in groups) and all(len(g) >= 2 for g in groups)
            for t in (t for g in groups for t in g):
                assert t.rewards["total"] == 1.0 + t.rewards["length"] and t.rewards["length"] % 3 != 0
                assert t.score_status["odd_reward:reward"].value == t.rewards["total"]
            assert lines(run, "rollout")[-1]["failed"] > 0

    asyncio.run(go())


@pytest.mark.parametrize(
    ("body", "says"),
    [("raise ValueError('no good')", "raised ValueError: no good"), ("return float('nan')", "returned nan (float)")],
)
def test_a_reward_that_never_scores_ends_the_run_and_is_quoted(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path, body: str, says: str
) -> None:
    (tmp_path / "bad_reward.py").write_text(f"def reward(prompt, completion, answer, metadata):\n    {body}\n")
    r = recipe(reward={"function": "bad_reward:reward", "folder": str(tmp_path), "max_consecutive_failures": 10})

    async def go() -> None:
        async with hand_run(tmp_path, r) as run:
            role = await started(run, r, fresh)
            with pytest.raises(UserError, match=r"\d\d completions in a row could not be scored") as e:
                await ends(role)
            assert says in str(e.value)
            assert run.state().held == 0

    asyncio.run(go())


def test_uniform_groups_are_filtered_and_give_their_room_back(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path
) -> None:
    """Fault 36: with every group filtered, sampling would stop after the first bound's worth of them."""
    (tmp_path / "flat_reward.py").write_text("def reward(prompt, completion, answer, metadata):\n    return 0.5\n")
    r = recipe(
        reward={"function": "flat_reward:reward", "folder": str(tmp_path)},
        rollout={"filter_uniform": True, "max_new_tokens": 2},
        buffer={"max_staleness": 0, "max_attempts": 1},
    )

    async def go() -> None:
        async with hand_run(tmp_path, r) as run:
            role = await started(run, r, fresh)
            state = await run.until("filtered trajectories", filtered=5 * 4 * 4)  # the bound allows 4 groups at a time
            assert state.held == 0 and state.counters.failed == 0
            run.phase("finishing")
            assert await ends(role) == 0

    asyncio.run(go())


def test_an_engine_that_is_gone_does_not_lose_its_groups(
    fresh: TestEngine, recipe: Callable[..., Recipe], tmp_path: pathlib.Path
) -> None:
    from moe_asyncrl.engine.ports import free_port

    r = recipe()

    async def go() -> None:
        async with hand_run(tmp_path, r) as run:
            role = asyncio.create_task(_run(run.folder, r, 0))
            run.begin()
            run.join(f"http://127.0.0.1:{free_port()}", name="engine-0")  # nobody listens there
            run.join(fresh, name="engine-1")
            await serve_version(fresh, 0)
            run.commit(0)
            groups = await run.wait_take(1, 0)
            assert {t.identity.engine for g in groups for t in g} == {"engine-1"}
            assert run.state().counters.failed == 0
            run.phase("finishing")
            assert await ends(role) == 0

    asyncio.run(go())
