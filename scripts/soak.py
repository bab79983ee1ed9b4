"""Run the demo again and again for a while, each time with another seed, and watch that nothing breaks or stays behind.

`make soak SOAK_MINUTES=60`. Each round prints one line. It stops at the first round that fails, leaves a process behind
or needs a quarter more memory than the first; what to look at then stands in that round's run folder.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROUND_LIMIT_S = 1200.0
SETTLE_S = 10.0


def members(group: int) -> list[psutil.Process]:
    """Living processes that a round started: of its session, whatever they did to their process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def peak_memory(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants now; 0 once it is gone."""
    try:
        family = [process, *process.children(recursive=True)]
        return sum(member.memory_info().rss for member in family)
    except psutil.NoSuchProcess:
        return 0


def run_round(command: Path, folder: Path, seed: int) -> tuple[str | None, dict[str, object]]:
    """One demo. Returns what is wrong (None if nothing) and the figures of the round."""
    arguments = [str(command), "demo", f"run.seed={seed}", f"run.folder={folder}"]
    start, peak = time.monotonic(), 0
    descendants: dict[int, psutil.Process] = {}
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        if time.monotonic() - start > ROUND_LIMIT_S:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            return f"no end after {ROUND_LIMIT_S:g} s", {}
        peak = max(peak, peak_memory(watched))
        try:
            descendants |= {child.pid: child for child in watched.children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(1)
    status = process.wait(60)
    end = time.monotonic() + SETTLE_S
    while (orphans := living(descendants, process.pid)) and time.monotonic() < end:
        time.sleep(0.5)
    figures: dict[str, object] = {"seconds": round(time.monotonic() - start), "peak_gib": round(peak / 2**30, 2)}
    if status != 0:
        return f"exit code {status}", figures
    if orphans:
        return f"left behind: {', '.join(str(orphan) for orphan in orphans)}", figures
    summary = json.loads((folder / "latest" / "summary.json").read_text())
    for name in ("accuracy_before", "accuracy_after", "weight_versions", "replay_coverage", "overlap"):
        figures[name] = summary.get(name)
    if summary.get("status") != "ok" or summary.get("error"):
        return f"summary says {summary.get('status')}: {summary.get('error')}", figures
    if summary.get("replay_coverage") != 1.0:
        return f"replay coverage is {summary.get('replay_coverage')}", figures
    return None, figures


def living(descendants: dict[int, psutil.Process], session: int) -> list[int]:
    """Ids of the round's processes that are still there. `is_running` knows a reused id from the old process."""
    left = {pid for pid, p in descendants.items() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    return sorted(left | {member.pid for member in members(session)})


def main() -> int:
    """Exit code 0 if every round was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    arguments = parser.parse_args()
    command = Path(sys.executable).with_name("moe-asyncrl")
    end = time.monotonic() + 60 * arguments.minutes
    number, first_peak = 0, 0.0
    while number == 0 or time.monotonic() < end:
        wrong, figures = run_round(command, arguments.folder.resolve(), number)
        print(f"soak round {number}: {wrong or 'ok'} {json.dumps(figures)}", flush=True)
        if wrong is not None:
            return 1
        peak = float(str(figures["peak_gib"]))
        first_peak = first_peak or peak
        if peak > 1.25 * first_peak:
            print(f"soak: peak memory grew from {first_peak:g} to {peak:g} GiB", file=sys.stderr)
            return 1
        number += 1
    print(f"soak: {number} rounds ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
