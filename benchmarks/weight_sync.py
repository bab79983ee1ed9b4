"""How fast new weights reach an engine: whole, beside the wire and SGLang's own way; and as changes.

    python -m benchmarks.weight_sync --quick
    python -m benchmarks.weight_sync --sweep

SmolLM2-135M made into a mixture of six experts, 1.1 GB in bfloat16; one trainer process with Megatron-Core's parameters
and one real SGLang server on the same machine. In each round, one after the other: raw gloo, the floor
(`sync/floor.py`), a whole update from the trainer's parameters to a committed engine, and SGLang's update of one
tensor at a time. Then the changes of optimizer steps on English text at a learning rate of 1e-6 (`sync/steps.py`),
taken once and kept in `build/weight_sync`. The engine's own checksums say whether both ways end in the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import print_result
from benchmarks.sync.floor import Pair
from benchmarks.sync.in_flight import InFlight, Seen
from benchmarks.sync.mixture import EXPERTS, mixture
from benchmarks.sync.one_by_one import one_by_one
from benchmarks.sync.ours import OneEngine, Trainer
from benchmarks.sync.steps import Steps, open_steps
from moe_asyncrl.config.recipe import Weights
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.command import EngineArgs
from moe_asyncrl.engine.server import Server

WARM, UPDATES = 100, 10
SHORT_WARM, SHORT_UPDATES = 2, 2
"""Where no steps were taken before and the time is short."""
IN_FLIGHT = 4
"""Requests that live through an update, where the pause is looked at."""


@dataclass
class Rounds:
    """Seconds of each way, round by round."""

    raw: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)
    seen: Seen = field(default_factory=lambda: Seen(0.0, 0.0))


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median over the rounds of our rate over theirs: the bytes are the same."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


class Bench:
    """What lives through all measurements: the server, the trainer, the version that is served."""

    def __init__(self, server: Server, key: str, trainer: Trainer) -> None:
        self._server, self._key, self.trainer = server, key, trainer
        self.control = OneEngine(server.url)

    def publisher(self, **weights: Any) -> Any:
        """With the recipe's settings but for these."""
        return self.trainer.publisher(self.control, self._key, Weights(**weights))

    def publish(self, publisher: Any) -> Any:
        """The weights as they are, as the next version; the report. Raises RuntimeError if an engine fell."""
        report = publisher.publish(self.control.version + 1)
        if report.lost:
            raise RuntimeError(f"the update failed: {report.lost}")
        return report

    def checksum(self) -> str:
        """Of the engine's weights, by itself."""

        async def ask() -> str:
            async with EngineClient(self._server.url, api_key=self._key) as client:
                return await client.checksum(deadline_s=120)

        return asyncio.run(ask())

    def one_by_one(self) -> float:
        """SGLang's way, once; seconds."""
        tensors = self.trainer.hf_tensors()
        self.control.version += 1
        return asyncio.run(one_by_one(self._server.url, self._key, tensors, str(self.control.version)))

    def in_flight(self, publisher: Any) -> tuple[Seen, float]:
        """What requests see of an update, and the pause that the trainer reports, in seconds."""
        requests = InFlight(self._server.url, self._key, count=IN_FLIGHT)
        requests.start()
        report = self.publish(publisher)
        return requests.stop(), report.pause_seconds


def whole(bench: Bench, pair: Pair, rounds: int, **weights: Any) -> Rounds:
    """All ways in turn, `rounds` times."""
    found = Rounds()
    publisher = bench.publisher(delta="off", **weights)
    try:
        for _ in range(2):
            bench.publish(publisher)  # the first two learn where tensors lie, and prove it
        pair.measure("raw")
        pair.measure("floor")
        for _ in range(rounds):
            found.raw.append(pair.measure("raw"))
            found.floor.append(pair.measure("floor"))
            report = bench.publish(publisher)
            found.ours.append(report.seconds)
            found.paused.append(report.pause_seconds)
        found.seen, _ = bench.in_flight(publisher)
    finally:
        publisher.close()
    return found


def changes(bench: Bench, steps: Steps, updates: int) -> dict[str, Any]:
    """The changes of `updates` optimizer steps, whole updates before and behind, the last ones of equal weights."""
    weights = steps.base()
    bench.trainer.put(weights)
    full, delta = some_whole(bench), []
    publisher = bench.publisher(delta="auto")
    try:
        bench.publish(publisher)
        for number in range(updates):
            steps.apply(number, weights)
            bench.trainer.put(weights)
            delta.append(bench.publish(publisher))
        seen, _ = bench.in_flight(publisher)
    finally:
        publisher.close()
    if not all(report.delta for report in delta):
        raise RuntimeError("an update that should have been of changes was a full one")
    by_changes = bench.checksum()
    full += some_whole(bench)
    return {"full": full, "delta": delta, "seen": seen, "equal": by_changes == bench.checksum()}


def some_whole(bench: Bench) -> list[Any]:
    """The reports of three whole updates."""
    publisher = bench.publisher(delta="off")
    try:
        return [bench.publish(publisher) for _ in range(3)]
    finally:
        publisher.close()


def sweep(bench: Bench, sizes: Sequence[int], depths: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Whole updates with buckets of each size (MiB) and each number in flight, interleaved: seconds, medians."""
    cases = [(size, depth) for size in sizes for depth in depths]
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for size, depth in cases:
            publisher = bench.publisher(delta="off", bucket_mib=size, depth=depth)
            try:
                bench.publish(publisher)
                times[size, depth] += [bench.publish(publisher).seconds for _ in range(2)]
            finally:
                publisher.close()
    return [
        {"bucket_mib": size, "depth": depth, "seconds": statistics.median(times[size, depth])} for size, depth in cases
    ]


def main() -> None:
    """Measure, print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds: under 240 s on two cores")
    options.add_argument("--sweep", action="store_true", help="whole updates with buckets and depths of many sizes")
    options.add_argument("--bucket-mib", type=int, help="size of a bucket (default: the recipe's)")
    options.add_argument("--depth", type=int, help="buckets in flight (default: the recipe's)")
    args = options.parse_args()
    given = {"bucket_mib": args.bucket_mib, "depth": args.depth}
    weights = {name: value for name, value in given.items() if value is not None}
    settings = Weights(**weights)
    rounds = 3 if args.quick else 7
    path = mixture()
    steps = None if args.sweep else find_steps(args.quick)
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as scratch:
        server = Server.start(
            EngineArgs(
                model=str(path),
                port=0,
                python=sys.executable,
                dtype="bfloat16",
                max_total_tokens=8192,
                max_running_requests=8,
                api_key=key,
            ),
            cpu=True,
            log_path=Path(scratch) / "engine.log",
        )
        with server, Trainer(path) as trainer:
            server.wait_ready(240)
            bench = Bench(server, key, trainer)
            if args.sweep:
                found = sweep(bench, (8, 16, 32, 64, 128, 256), (2, 4), 1 if args.quick else 3)
                for case in found:
                    print(f"{case['bucket_mib']:4.0f} MiB, {case['depth']:.0f} in flight: {case['seconds']:.2f} s")
                best = min(found, key=lambda case: case["seconds"])
                print_result("weight_sync", ratios={}, figures={"best": best, "all": found}, settings={"sweep": True})
                return
            pair = Pair(list(trainer.parameters.values()), bucket_bytes=settings.bucket_mib << 20, depth=settings.depth)
            try:
                times = whole(bench, pair, rounds, **weights)
                peers = [bench.one_by_one() for _ in range(2 if args.quick else 3)]
            finally:
                pair.close()
            assert steps is not None
            changed = changes(bench, steps, min(UPDATES, steps.taken.updates))
    report(args.quick, settings, rounds, pair.bytes, times, peers, steps, changed)


def report(
    quick: bool,
    settings: Weights,
    rounds: int,
    nbytes: int,
    times: Rounds,
    peers: Sequence[float],
    steps: Steps,
    changed: dict[str, Any],
) -> None:
    """The one line."""
    full, delta, seen = changed["full"], changed["delta"], changed["seen"]
    ours = statistics.median(times.ours)
    mean = {
        "bytes": statistics.mean(r.bytes for r in delta),
        "seconds": statistics.mean(r.seconds for r in delta),
        "pause": statistics.mean(r.pause_seconds for r in delta),
        "changed": statistics.mean(r.changed for r in delta),
    }
    print_result(
        "weight_sync",
        ratios={
            "full_vs_raw": ratio(times.raw, times.ours),
            "full_vs_floor": ratio(times.floor, times.ours),
            "full_vs_one_by_one": statistics.median(peers) / ours,
            "delta_bytes_vs_full": mean["bytes"] / full[0].bytes,
            "delta_time_vs_full": mean["seconds"] / statistics.median(r.seconds for r in full),
            "delta_pause_vs_full": mean["pause"] / statistics.median(r.pause_seconds for r in full),
        },
        figures={
            "gb": nbytes / 1e9,
            "raw_s": statistics.median(times.raw),
            "floor_s": statistics.median(times.floor),
            "full_s": ours,
            "full_paused_s": statistics.median(times.paused),
            "full_beside_deltas_s": statistics.median(r.seconds for r in full),
            "one_by_one_s": statistics.median(peers),
            "delta_s": mean["seconds"],
            "delta_paused_s": mean["pause"],
            "delta_mb": mean["bytes"] / 1e6,
            "changed_fraction": mean["changed"],
            "digests_equal": changed["equal"],
            "longest_gap_of_requests_full_s": times.seen.longest,
            "longest_gap_of_requests_delta_s": seen.longest,
            "usual_gap_of_requests_s": seen.usual,
        },
        settings={
            "quick": quick,
            "rounds": rounds,
            "bucket_mib": settings.bucket_mib,
            "depth": settings.depth,
            "experts": EXPERTS,
            "warm_steps": steps.taken.warm,
            "delta_updates": len(delta),
            "lr": steps.taken.lr,
            "tokens_of_a_step": steps.taken.tokens,
        },
    )


def find_steps(quick: bool) -> Steps:
    """The steps that were kept; where there are none, they are taken now by a process, fewer if `quick`."""
    found = open_steps(WARM, UPDATES, EXPERTS)
    if found is not None:
        return found
    warm, updates = (SHORT_WARM, SHORT_UPDATES) if quick else (WARM, UPDATES)
    found = open_steps(warm, updates, EXPERTS)
    if found is None:
        command = [sys.executable, "-m", "benchmarks.sync.steps", "--warm", str(warm), "--updates", str(updates)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = open_steps(warm, updates, EXPERTS)
    assert found is not None
    return found


if __name__ == "__main__":
    main()
