"""Looking at a long run: report, trace, top and summary on a folder of 100,000 steps and ten million events.

    python -m benchmarks.long_run --quick

The folder is made, not run (benchmarks/made_run.py). Each program is a process of its own, measured by the kernel:
seconds, CPU seconds and the largest resident memory. `--quick` makes a tenth of the steps and events. The ratios are
parts of what is allowed at full size: 10 s and 1 GiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import print_result

COMMAND = str(Path(sys.executable).with_name("moe-asyncrl"))
LIMIT_S = 300
MAKE = """
import sys
from pathlib import Path
from benchmarks.made_run import make_run
make_run(Path(sys.argv[1]), steps=int(sys.argv[2]), events_per_step=100)
"""
SUMMARIZE = """
import sys
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.summary import TrajectoryCounts, summarize
print(summarize(RunFolder(sys.argv[1]), status="ok", error=None, seconds=1.0, counts=TrajectoryCounts()))
"""


def measured(*command: str) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of a process. Raises RuntimeError if it fails."""
    began = time.monotonic()
    # posix_spawn and wait4: the figures are those of this child alone.
    with open(os.devnull, "w") as nowhere:
        pid = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1)])
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return {
        "s": time.monotonic() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "gib": usage.ru_maxrss / 2**20,
    }


def main() -> None:
    """Make the folder, look at it in every way, print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a tenth of the size: under 60 s on two cores")
    options.add_argument("--steps", type=int, help="steps of the run; each has 100 events")
    options.add_argument("--folder", type=Path, help="where to make it (default: a temporary folder)")
    args = options.parse_args()
    steps = args.steps or (10_000 if args.quick else 100_000)
    with tempfile.TemporaryDirectory(prefix="long-run-", dir=args.folder) as scratch:
        run = Path(scratch) / "run"
        # In a process of its own: a child's peak begins with the size of the process that started it.
        subprocess.run([sys.executable, "-c", MAKE, str(run), str(steps)], check=True, timeout=LIMIT_S)
        size = sum(p.stat().st_size for p in run.glob("*.jsonl"))
        found = {
            "report": measured(COMMAND, "report", str(run)),
            "top": measured(COMMAND, "top", str(run), "--once"),
            "trace_of_100_steps": measured(COMMAND, "trace", str(run), "--from", str(steps - 100), "--to", str(steps)),
            "summary": measured(sys.executable, "-c", SUMMARIZE, str(run)),
        }
        page = (run / "report.html").stat().st_size
    print_result(
        "long_run",
        ratios={
            "report_of_10_s": found["report"]["s"] / 10,
            "top_of_10_s": found["top"]["s"] / 10,
            "memory_of_1_gib": max(figures["gib"] for figures in found.values()),
        },
        figures={
            **{f"{name}_{k}": v for name, figures in found.items() for k, v in figures.items()},
            "report_mib": page / 2**20,
        },
        settings={"quick": args.quick, "steps": steps, "events": 100 * steps + 1, "mib": round(size / 2**20)},
    )


if __name__ == "__main__":
    main()
