"""The whole loop on one machine: rates and overlap on a short-answer and on a long-tailed task.

    python -m benchmarks.end_to_end --quick

short: additions, answers of a few tokens. long: the prompt sets the length of its answer, drawn log-normal with a mean
of 64 tokens, at most 512; the sampler does not stop earlier. Both use the demo's model, batch and layout.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import print_result
from moe_asyncrl.cluster.demo import MODEL_SHAPE, NUMBERS_BELOW, recipe_path
from moe_asyncrl.cluster.run_setup import absolute, create_run_folder, preflight
from moe_asyncrl.cluster.supervisor import Supervisor
from moe_asyncrl.config.load import load_recipe
from moe_asyncrl.data.arithmetic import additions, write_prompts
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.telemetry.jsonl import read_jsonl

LENGTH_MEAN = 64.0
LENGTH_SIGMA = 1.0
LENGTH_MAX = 512
SKIPPED_STEPS = 2
"""The first steps start with an empty pipeline."""


def answer_lengths(count: int, seed: int) -> np.ndarray:
    """Log-normal lengths in [1, LENGTH_MAX], int64 [count], whose mean before the cap is LENGTH_MEAN."""
    mu = math.log(LENGTH_MEAN) - LENGTH_SIGMA**2 / 2
    drawn = np.random.default_rng(seed).lognormal(mu, LENGTH_SIGMA, count)
    return np.clip(np.rint(drawn), 1, LENGTH_MAX).astype(np.int64)


def write_long_prompts(path: Path, count: int, seed: int) -> None:
    """Additions whose metadata sets the length of the answer."""
    training, _ = additions(below=NUMBERS_BELOW, held_out=10, seed=seed)
    lengths = answer_lengths(count, seed)
    lines = [
        msgspec.json.encode({**s.record(), "length": int(n)}) for s, n in zip(training[:count], lengths, strict=True)
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")


def measure(task: str, steps: int, folder: Path, seed: int) -> dict[str, Any]:
    """Run the loop for `steps` steps and return its rates. Raises RuntimeError if the run fails."""
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model, "qwen3_moe", seed, **MODEL_SHAPE)
    prompts = folder / f"{task}.jsonl"
    overrides = [
        f"run.name={task}",
        f"run.folder={folder / 'runs'}",
        f"run.steps={steps}",
        f"model.path={model}",
        f"data.train={prompts}",
        "data.eval=null",
        "warmup.steps=0",
        "replay.probe_every=0",
        "checkpoint.every=0",
    ]
    if task == "short":
        write_prompts(prompts, additions(below=NUMBERS_BELOW, held_out=10, seed=seed)[0])
        overrides += ["rollout.ignore_eos=true", "rollout.max_new_tokens=4"]
    else:
        write_long_prompts(prompts, 4000, seed)
        overrides += [
            "rollout.ignore_eos=true",
            f"rollout.max_new_tokens={LENGTH_MAX}",
            "rollout.max_new_tokens_field=length",
            "model.max_context=640",
            "rollout.groups_per_step=32",
            "rollout.groups_per_request=4",
        ]
    recipe = absolute(load_recipe(recipe_path("demo"), overrides), Path.cwd())
    preflight(recipe)
    run = create_run_folder(recipe)
    summary = Supervisor(run, recipe).run()
    if summary.status != "ok":
        raise RuntimeError(f"{task}: {summary.error}")
    lines = [m for m in read_jsonl(run.metrics_path) if m["kind"] == "step"][SKIPPED_STEPS:]
    spans = [e for e in read_jsonl(run.events_path) if e["span"] == "generate"]
    first, last = lines[0]["time"] - lines[0]["turn_seconds"], lines[-1]["time"]
    inside = [e for e in spans if first <= e["end"] <= last]
    return {
        "sampled_tokens_per_s": sum(e["tokens"] for e in inside) / (last - first),
        "trained_tokens_per_s": sum(m["tokens"] for m in lines) / (last - first),
        "seconds_per_step": statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(lines)),
        "seconds_in_step": statistics.median(m["step_seconds"] for m in lines),
        "overlap": summary.overlap,
        "staleness_max": summary.staleness_max,
        "replay_coverage": summary.replay_coverage,
    }


def main() -> None:
    """Measure both tasks and print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer steps: under 240 s on two cores")
    options.add_argument("--task", choices=("short", "long", "both"), default="both")
    options.add_argument("--steps", type=int, help="steps of each task")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    steps = {"short": 20, "long": 8} if args.quick else {"short": 100, "long": 30}
    tasks = ("short", "long") if args.task == "both" else (args.task,)
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as scratch:
        found = {t: measure(t, args.steps or steps[t], Path(scratch), args.seed) for t in tasks}
    main_task = found[tasks[0]]
    print_result(
        "end_to_end",
        ratios={"overlap": main_task["overlap"], **{f"overlap_{t}": f["overlap"] for t, f in found.items()}},
        figures={
            "sampled_tokens_per_s": main_task["sampled_tokens_per_s"],
            "trained_tokens_per_s": main_task["trained_tokens_per_s"],
            **{f"{t}_{k}": v for t, f in found.items() for k, v in f.items() if k != "overlap"},
        },
        settings={"quick": args.quick, "steps": {t: args.steps or steps[t] for t in tasks}, "seed": args.seed},
    )


if __name__ == "__main__":
    main()
