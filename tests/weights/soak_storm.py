"""The long form of the storm: `python -m tests.weights.soak_storm`, a part of `make soak`.

Two engines (of one rank, and of two with expert parallelism), a flow of more requests than they run at once, and an
update every few hundred milliseconds, over each transport and with either interrupt policy. Every reply is compared
with transformers. Last, an engine that trusts the prefix keys of its clients, whose wrong replies must be found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.fixtures import START_S, EngineHouse, Key, TestEngine
from tests.engines.models import make_model
from tests.pool.pool import WorkerPool
from tests.weights.flow import Flow, Reply
from tests.weights.lived import judge
from tests.weights.mix import Mixed
from tests.weights.storm import PLANTED, check_replies, check_times
from tests.weights.test_publish import EP2_PP2, members_of
from tests.weights.unstamped import unstamped

KEYS = (Key("qwen3_moe", 1, 1, 0), Key("qwen3_moe", 2, 2, 0))
TRANSPORTS = ("broadcast", "direct", "disk", "shared_memory")
INTERRUPTS = ("in_flight", "retract")


def main() -> None:
    """Run, print one line a storm, and fail on the first reply that is wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--updates", type=int, default=40)
    options.add_argument("--every", type=float, default=0.3, help="seconds from update to update")
    options.add_argument("--slots", type=int, default=72, help="requests under way on each engine (it runs 64)")
    options.add_argument("--transport", choices=TRANSPORTS, action="append", help="only these")
    options.add_argument("--interrupt", choices=INTERRUPTS, action="append", help="only these")
    args = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-storm-"))
    house, pool = EngineHouse(folder), WorkerPool(size=4)
    try:
        for key in KEYS:
            house.begin(key)
        engines = [house.get(key) for key in KEYS]
        second = make_model("qwen3_moe", folder / "second", seed=7)
        mixed = Mixed(engines[0].model, second)
        total = 0
        for transport in args.transport or TRANSPORTS:
            for interrupt in args.interrupt or INTERRUPTS:
                ways = {"interrupt": interrupt, "delta": "auto", "transport": transport}
                replies, updates = storm(pool, engines, second, folder, ways, args)
                check_times(replies, updates)
                account = check_replies(mixed, replies, keep=interrupt == "in_flight", plant_every=10)
                for kind, found in account.planted.items():
                    if min(found) < PLANTED:
                        raise SystemExit(f"{transport}, {interrupt}: {kind} came to {min(found):.1e} only")
                total += account.replies
                paused = statistics.median(u["pause"] for u in updates)
                deltas = sum(u["delta"] for u in updates)
                print(
                    f"{transport}, {interrupt}: {len(updates)} updates ({deltas} deltas, median pause {paused:.2f} s); "
                    f"{account.say()}",
                    flush=True,
                )
        wrong = planted(pool, house, engines[0], second, folder, mixed, args)
        print(json.dumps({"name": "soak_storm", "replies": total, "wrong_without_stamps": wrong}))
    finally:
        pool.close()
        house.stop()
        shutil.rmtree(folder, ignore_errors=True)


def storm(
    pool: WorkerPool,
    engines: Sequence[TestEngine],
    second: Path,
    folder: Path,
    ways: dict[str, Any],
    args: argparse.Namespace,
) -> tuple[list[Reply], list[dict[str, Any]]]:
    """One storm; all replies, and all updates."""

    def job(name: str, **arguments: Any) -> list[Any]:
        return pool.run(f"tests.weights.{name}", layout=EP2_PP2, timeout_s=600, **arguments)

    for one in engines:
        one.reset()
    place = folder / "weights"
    shutil.rmtree(place, ignore_errors=True)
    model = str(engines[0].model)
    job("jobs:start", hf_dir=model, members=members_of(engines), weights=ways, folder=str(place))
    try:
        job("storm_jobs:hold_two", second=str(second))
        updates = job("storm_jobs:storm", first=0, count=1, every_s=0.0)[0]
        with Flow(engines, slots=args.slots, seed=len(ways["transport"])) as flow:
            updates += job("storm_jobs:storm", first=1, count=args.updates, every_s=args.every)[0]
            until = updates[-1]["ended"]
            flow.wait(lambda f: sum(r.began > until for r in f.replies) >= 4, 120, "replies of the last version")
    finally:
        job("jobs:stop")
    bad = [u for u in updates if len(u["engines"]) != len(engines) or u["lost"]]
    if flow.failures or bad:
        raise SystemExit(f"{ways}: {flow.failures[:2]} {bad[:2]}")
    return flow.replies, updates


def planted(
    pool: WorkerPool,
    house: EngineHouse,
    like: TestEngine,
    second: Path,
    folder: Path,
    mixed: Mixed,
    args: argparse.Namespace,
) -> int:
    """How many replies are wrong where nothing keeps requests from prefixes of other weights. Some have to be."""
    house.end(KEYS[1])
    faulty = unstamped(like, folder / "plugin")
    try:
        faulty.server.wait_ready(START_S)
        few = argparse.Namespace(updates=6, every=1.0, slots=8)
        replies, _ = storm(pool, [faulty], second, folder, {"interrupt": "in_flight"}, few)
    finally:
        faulty.server.stop()
    began = time.monotonic()
    cached = [r for r in replies if r.done.cached_tokens]
    wrong = sum(judge(mixed, r.prompt, r.done, keep=True).worst >= PLANTED for r in cached)
    print(f"without stamps: {wrong} of {len(cached)} replies with cached prefixes are wrong", flush=True)
    if not wrong:
        raise SystemExit(
            f"the check finds nothing wrong where prefixes cross versions ({time.monotonic() - began:.0f} s)"
        )
    return wrong


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
