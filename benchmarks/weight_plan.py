"""How long it takes to plan and check a weight update of Kimi-K2, from 1,024 trainer GPUs to 512 engine GPUs.

    python -m benchmarks.weight_plan [--quick]

Each mode in a process of its own: from the start of Python's imports to a plan that has passed its check, and the peak
of that process's memory. Pure arithmetic: no GPU, no network, no weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import print_result

MODEL = Path(__file__).resolve().parents[1] / "configs" / "models" / "kimi-k2.yaml"
LIMIT_S = 120
ONE = """
import json, resource, sys, time
began, cpu = time.monotonic(), time.process_time()
from pathlib import Path
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.published import read_published
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_figures import figures
from moe_asyncrl.weights.plan_make import make_plan
spec = read_published(Path(sys.argv[1])).spec
layout = Layout(tp=8, pp=8, ep=32, dp=16, stage_layers=(8, 8, 8, 8, 8, 8, 8, 5))
engines = [EngineLayout(tp=32, ep=32, attention_dp=8, redundant_experts=32)] * 16
plan = make_plan(spec, layout, engines, mode=sys.argv[2], bucket_bytes=int(sys.argv[3]) * 2**20)
made = time.monotonic()
check(plan)
checked = time.monotonic()
f = figures(plan)
print(json.dumps({
    "plan_s": made - began,
    "check_s": checked - made,
    "cpu_s": time.process_time() - cpu,
    "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "buckets": f.buckets,
    "broadcasts": f.broadcasts,
    "messages": f.messages,
    "busiest_over_best": f.sent.max / f.sent_at_best,
    "trainer_ranks": f.trainer_ranks,
    "engine_ranks": f.engine_ranks,
}))
"""


def one(mode: str, bucket_mib: int) -> dict[str, float]:
    """The figures of one plan. Raises subprocess errors if it fails or takes over two minutes."""
    done = subprocess.run(
        [sys.executable, "-c", ONE, str(MODEL), mode, str(bucket_mib)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Plan in both modes, several times; print the medians."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="once in each mode: under 60 s on two cores")
    options.add_argument("--bucket-mib", type=int, default=256, help="size of a bucket (default: 256)")
    args = options.parse_args()
    times = 1 if args.quick else 5
    found = {mode: [one(mode, args.bucket_mib) for _ in range(times)] for mode in ("broadcast", "direct")}
    medians = {
        mode: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for mode, runs in found.items()
    }
    worst = [m["plan_s"] + m["check_s"] for m in medians.values()]
    print_result(
        "weight_plan",
        ratios={
            "time_of_10_s": max(worst) / 10,
            "memory_of_2_gib": max(m["peak_gib"] for m in medians.values()) / 2,
        },
        figures={f"{mode}_{name}": value for mode, m in medians.items() for name, value in m.items()},
        settings={"quick": args.quick, "times": times, "model": MODEL.stem, "bucket_mib": args.bucket_mib},
    )


if __name__ == "__main__":
    main()
