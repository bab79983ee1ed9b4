"""The long form of the update tests: `python -m tests.weights.soak_updates`, a part of `make soak`.

Trainers on three layouts, two engines (of one rank, and of two with expert parallelism), four transports: after each of
20 updates in a row the engines' log-probabilities equal transformers on the exported weights. Then 100 updates in a row
with changes, over each transport, whose time and memory must not grow (faults 11 and 43).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moe_asyncrl.models.layout import Layout
from tests.engines.fixtures import EngineHouse, Key, TestEngine
from tests.engines.models import Reference
from tests.pool.pool import WorkerPool
from tests.weights.test_publish import EP2_PP2, JOBS, TOLERANCE, TP2_EP2, VPP2, deviation, members_of

LAYOUTS = {"EP2 x PP2": EP2_PP2, "TP2 x EP2": TP2_EP2, "PP2 x VPP2": VPP2}
TRANSPORTS = ("broadcast", "direct", "disk", "shared_memory")
SLOPE_S = 0.002
"""Seconds an update may grow by each time."""
SLOPE_BYTES = 100_000
"""Bytes a process may grow by each time."""

Run = Callable[..., list[Any]]


def main() -> None:
    """Run, print one line a part, and fail on the first value that is wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--updates", type=int, default=20)
    options.add_argument("--many", type=int, default=100)
    options.add_argument("--transport", choices=TRANSPORTS, action="append", help="only these")
    args = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-updates-"))
    house, pool = EngineHouse(folder), WorkerPool(size=4)
    try:
        keys = (Key("qwen3_moe", 1, 1, 0), Key("qwen3_moe", 2, 2, 0))
        for key in keys:
            house.begin(key)
        engines = [house.get(key) for key in keys]
        for name, layout in LAYOUTS.items():
            for transport in args.transport or TRANSPORTS:
                consecutive(pool, layout, name, transport, engines, folder, args.updates)
        for transport in args.transport or TRANSPORTS:
            without_slope(pool, transport, engines, folder, args.many)
        print(json.dumps({"name": "soak_updates", "failed": 0}))
    finally:
        pool.close()
        house.stop()
        shutil.rmtree(folder, ignore_errors=True)


def runner(pool: WorkerPool, layout: Layout) -> Run:
    return lambda job, **arguments: pool.run(JOBS + job, layout=layout, timeout_s=600, **arguments)


def begin(run: Run, transport: str, engines: Sequence[TestEngine], folder: Path) -> None:
    for one in engines:
        one.reset()
    place = folder / "weights"
    shutil.rmtree(place, ignore_errors=True)
    run(
        "start",
        hf_dir=str(engines[0].model),
        members=members_of(engines),
        weights={"transport": transport, "delta": "auto"},
        folder=str(place),
    )


def consecutive(
    pool: WorkerPool, layout: Layout, name: str, transport: str, engines: Sequence[TestEngine], folder: Path, count: int
) -> None:
    """Updates in a row, each checked: every fifth changes everything, the others a few elements."""
    run = runner(pool, layout)
    begin(run, transport, engines, folder)
    worst, deltas, seconds = 0.0, 0, []
    for version in range(count):
        run("nudge" if version % 5 else "perturb", step=version)
        report = run("publish", version=version)[0]
        if len(report.get("engines", ())) != len(engines) or report["lost"]:
            raise SystemExit(f"{name}, {transport}, version {version}: {report}")
        deltas += report["delta"]
        seconds.append(report["seconds"])
        out = folder / "exported"
        run("export", out=str(out))
        reference = Reference(out)
        worst = max(worst, *(deviation(one, reference, version) for one in engines))
        shutil.rmtree(out)
        if worst > TOLERANCE:
            raise SystemExit(f"{name}, {transport}, version {version}: {worst:.1e} away from transformers")
    run("stop")
    print(
        f"{name}, {transport}: {count} updates ({deltas} deltas), largest difference {worst:.1e}, "
        f"median {statistics.median(seconds):.2f} s",
        flush=True,
    )


def without_slope(pool: WorkerPool, transport: str, engines: Sequence[TestEngine], folder: Path, count: int) -> None:
    """Many updates in a row with changed weights; the last three quarters of them count."""
    run = runner(pool, EP2_PP2)
    begin(run, transport, engines, folder)
    before = engine_memory(engines)
    began = time.monotonic()
    held = run("publish_many", first=0, count=count, change="nudge")
    took = time.monotonic() - began
    run("stop")
    time_slope = slope(held[0]["seconds"])
    memory_slope = max(slope(one["memory"]) for one in held)
    engine_slope = (engine_memory(engines) - before) / count
    print(
        f"{transport}: {count} updates in {took:.0f} s; slopes {1e3 * time_slope:.2f} ms, trainer "
        f"{memory_slope / 1e3:.0f} kB, engines {engine_slope / 1e3:.0f} kB an update",
        flush=True,
    )
    if time_slope > SLOPE_S or memory_slope > SLOPE_BYTES or engine_slope > 10 * SLOPE_BYTES:
        raise SystemExit(f"{transport}: time or memory grows with every update")


def slope(values: Sequence[float]) -> float:
    """Of the line through the last three quarters: by how much a value grows each time, robust against outliers."""
    kept = np.asarray(values[len(values) // 4 :], float)
    half = len(kept) // 2
    return float(np.median(kept[half:]) - np.median(kept[:half])) / max(1, len(kept) - half)


def engine_memory(engines: Sequence[TestEngine]) -> int:
    """Resident bytes of all processes of the engines."""
    found = 0
    for one in engines:
        leader = psutil.Process(one.server.pid)
        found += sum(p.memory_info().rss for p in [leader, *leader.children(recursive=True)])
    return found


if __name__ == "__main__":
    main()
