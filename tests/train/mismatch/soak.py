"""A long asynchronous run whose gap between sampler and trainer must neither be large nor grow.

    python -m tests.train.mismatch.soak --steps 100

The demo's model and recipe: bfloat16 engine, float32 trainer on two ranks, updates in flight. Probes measure the gap on
tokens of the trainer's own weights, with replay and without. Afterwards `moe-asyncrl mismatch` takes the recorded
trajectories apart. Prints one JSON line last, and ends with 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_asyncrl.data.recorded import newest_first
from moe_asyncrl.telemetry.jsonl import read_jsonl
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.train.mismatch.drift import slope_of

RATIO = 0.7
"""`kl_replay` must be below this part of `kl_live`."""
NOISE = 3.0
"""Standard errors within which a slope is noise."""
LIMIT_S = 3600


def run(folder: Path, steps: int, more: Sequence[str]) -> RunFolder:
    """The run, to its end. Raises SystemExit if it fails."""
    command = [
        *(sys.executable, "-c", "import sys; from moe_asyncrl.cli import main; sys.exit(main())", "demo"),
        *(f"run.folder={folder}", f"run.steps={steps}", "telemetry.console=plain"),
        *("replay.probe_every=4", "replay.probe_prompts=256", "eval.every=50"),
        *("checkpoint.every=20", "checkpoint.keep=10", "telemetry.record_groups_per_step=8"),
        *more,
    ]
    done = subprocess.run(command, timeout=LIMIT_S, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(f"the run failed: {folder / 'latest'}")
    return RunFolder(folder / "latest")


def several_versions(folder: RunFolder) -> dict[str, int]:
    """How many of the recorded trajectories were sampled while an update came."""
    recorded = [t for group in newest_first(folder.trajectories) for t in group.trajectories()]
    lived = sum(len(np.unique(t.weight_version[t.loss_mask])) > 1 for t in recorded)
    return {"recorded": len(recorded), "several_versions": lived}


def figures(folder: RunFolder) -> dict[str, Any]:
    """What the run came to."""
    records = list(read_jsonl(folder.metrics_path))
    steps = [r for r in records if r["kind"] == "step"]
    probes = [r for r in records if r["kind"] == "probe"]
    tokens = sum(p["tokens"] for p in probes)
    mean = {n: sum(p[n] * p["tokens"] for p in probes) / tokens for n in ("kl_replay", "kl_live")}
    slopes = {}
    for name, rows in (("kl_replay", probes), ("kl_live", probes), ("sampler_kl", steps)):
        found = slope_of([r["step"] for r in rows], [r[name] for r in rows])
        slopes[name] = {"slope": found.slope, "error": found.error, "score": found.score}
    return {
        "steps": len(steps),
        "probes": len(probes),
        "probe_tokens": tokens,
        "coverage": min(r["coverage"] for r in steps),
        "staleness_mean": sum(r["staleness_mean"] for r in steps) / len(steps),
        **several_versions(folder),
        **mean,
        "ratio": mean["kl_replay"] / mean["kl_live"],
        "ratio_each": sorted(round(p["kl_replay"] / p["kl_live"], 3) for p in probes),
        "slopes": slopes,
        "accuracy": [r["accuracy"] for r in records if r["kind"] == "eval"],
    }


def wrong(found: dict[str, Any], steps: int) -> list[str]:
    """What does not hold."""
    slopes = found["slopes"]
    checks = {
        f"{found['steps']} steps": found["steps"] == steps,
        f"coverage {found['coverage']}": found["coverage"] == 1.0,
        f"kl_replay / kl_live is {found['ratio']:.3f}": found["ratio"] < RATIO,
        "no update in flight": found["several_versions"] > 0,
        **{f"{n} drifts: {slopes[n]}": abs(slopes[n]["score"]) <= NOISE for n in ("kl_replay", "kl_live")},
    }
    return [what for what, holds in checks.items() if not holds]


def taken_apart(folder: RunFolder) -> dict[str, Any]:
    """`moe-asyncrl mismatch` on what the run recorded. Raises SystemExit if it fails."""
    command = [sys.executable, "-c", "import sys; from moe_asyncrl.cli import main; sys.exit(main())", "mismatch"]
    for more in ([], ["--same-version"]):
        print(f"mismatch {' '.join(more)}", flush=True)
        subprocess.run([*command, str(folder.path), *more], timeout=900, check=True, stderr=subprocess.DEVNULL)
    said = subprocess.run(
        [*command, str(folder.path), "--same-version", "--json"],
        timeout=900,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    values = json.loads(said.stdout)
    assert isinstance(values, dict)
    return {name: values[name] for name in ("version", "first", "gap", "findings")}


def main() -> int:
    """Run, measure, say."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--folder", type=Path, help="where the run is kept (default: nowhere)")
    p.add_argument("overrides", nargs="*", metavar="section.field=value")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-asyncrl-gap-") as scratch:
        folder = run(args.folder or Path(scratch), args.steps, args.overrides)
        found = figures(folder)
        broken = wrong(found, args.steps)
        apart = taken_apart(folder)
    print(json.dumps({"program": "gap", **found, "wrong": broken, "mismatch": apart}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
