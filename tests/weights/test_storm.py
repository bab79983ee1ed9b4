"""A steady flow of requests and a storm of updates: every reply is what the weights that it names say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.fixtures import TestEngine
from tests.engines.models import make_model
from tests.pool.pool import WorkerPool
from tests.weights.flow import Flow
from tests.weights.mix import Mixed
from tests.weights.storm import PLANTED, check_replies, check_times
from tests.weights.test_publish import EP2_PP2, engines_two, members_of

__all__ = ["engines_two"]
UPDATES = 5
EVERY_S = 0.4
SLOTS = 10


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other end of the line of versions."""
    return make_model("qwen3_moe", tmp_path_factory.mktemp("storm") / "second", seed=7)


@pytest.mark.parametrize("interrupt", ["in_flight", "retract"])
def test_every_reply_in_a_storm_is_of_the_weights_that_it_names(
    pool: WorkerPool, engines_two: tuple[TestEngine, TestEngine], second: Path, interrupt: str
) -> None:
    def job(name: str, **arguments: Any) -> list[Any]:
        return pool.run(name, layout=EP2_PP2, timeout_s=120, **arguments)

    ways = {"interrupt": interrupt, "delta": "auto", "transport": "broadcast"}
    job("tests.weights.jobs:start", hf_dir=str(engines_two[0].model), members=members_of(engines_two), weights=ways)
    try:
        job("tests.weights.storm_jobs:hold_two", second=str(second))
        updates = job("tests.weights.storm_jobs:storm", first=0, count=1, every_s=0.0)[0]
        with Flow(engines_two, slots=SLOTS, seed=len(interrupt)) as flow:
            updates += job("tests.weights.storm_jobs:storm", first=1, count=UPDATES, every_s=EVERY_S)[0]
            until = updates[-1]["ended"]
            flow.wait(lambda f: sum(r.began > until for r in f.replies) >= 4, 60, "replies of the last version")
    finally:
        job("tests.weights.jobs:stop")
    print([round(u["ended"] - u["began"], 2) for u in updates], [u["delta"] for u in updates])
    assert not flow.failures and all(len(u["engines"]) == 2 and not u["lost"] for u in updates), flow.failures[:2]
    assert any(u["delta"] for u in updates[1:]) and not all(u["delta"] for u in updates)
    check_times(flow.replies, updates)
    began = time.monotonic()
    account = check_replies(Mixed(engines_two[0].model, second), flow.replies, keep=interrupt == "in_flight")
    print(f"{interrupt}: {account.say()}; judged in {time.monotonic() - began:.1f} s")
    assert account.through_updates >= 10 and account.cached >= 5 and account.stale_key_cached >= 5, account
    assert {"labels off by one", "weights of two versions", "a prefix of the version before"} <= set(account.planted)
    assert {"the other policy", "a switch one token late"} <= set(account.planted)
    for kind, found in account.planted.items():
        assert min(found) >= PLANTED, (kind, sorted(found)[:5])
