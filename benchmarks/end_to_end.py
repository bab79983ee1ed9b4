"""The whole loop on one machine: rates and overlap on a short-answer and on a long-tailed task, alone or beside a peer.

    python -m benchmarks.end_to_end [--peer trl] [--quick]

`benchmarks/tasks.py` says what the tasks are. Ours is the demo's model, batch and layout: two trainer ranks and one
engine, each with one thread. `--peer trl` measures TRL's `GRPOTrainer` (version locked in requirements/trl.txt) in the
same run, with the same checkpoint, batches of prompts, lengths and learning rate, on two threads: ours, peer, ours,
peer, … The ratio is our trained tokens per second over the peer's, the median over the pairs.

What is timed, on both sides: as many optimizer steps, with everything in them (sampling, rewards, training, and on our
side the weight updates). What is not: starting processes, loading, and the first steps (ours: the pipeline fills; the
peer: caches warm up). A trained token is a sampled token that the loss is taken over, once; the padding is not counted.
Both sides sample every answer to its full length, the end token included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ours import SKIPPED_STEPS, Ours, measure
from benchmarks.pairs import Measured, median_ratio, pair_ratios, turns
from benchmarks.peer_trl.environment import ensure_environment
from benchmarks.peer_trl.process import Peer, settings
from benchmarks.report import print_result
from benchmarks.tasks import TASKS, Task, beginning_with, prompt_lines, write_lines
from moe_asyncrl.cluster.demo import MODEL_SHAPE
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tiny import make_tiny_model

LR = 1e-4
PEER_WARM_UP = 1
"""Steps of the peer that are not measured, with answers of at most `WARM_UP_TOKENS`."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Effort:
    """How much is measured of one task."""

    steps: int
    """Of each measurement."""
    pairs: int
    """Measurements of each side; without a peer there is one."""


def planned(task: str, *, quick: bool, peer: bool) -> Effort:
    """What fits into the time: a run of ours takes half a minute to start and to end, and so does a long peer step."""
    if not peer:
        return Effort({"short": 18, "long": 6}[task] if quick else {"short": 98, "long": 28}[task], 1)
    if quick:
        return {"short": Effort(6, 2), "long": Effort(2, 1)}[task]
    return {"short": Effort(40, 5), "long": Effort(6, 3)}[task]


@dataclass
class Found:
    """Measurements of one task."""

    ours: list[Ours] = field(default_factory=list)
    peer: list[Measured] = field(default_factory=list)
    peer_figures: list[dict[str, Any]] = field(default_factory=list)


def run_task(
    task: Task, effort: Effort, *, python: Path | None, folder: Path, seed: int, extra: Sequence[str]
) -> Found:
    """Measure one task: in turn with the peer, or once without. Raises UserError if a side fails."""
    steps = effort.steps
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model, "qwen3_moe", seed, **MODEL_SHAPE)
    lines = prompt_lines(task, seed)
    found = Found()

    def ours(first_batch: int) -> None:
        """Measure the batches from this one on: the skipped steps take those before it."""
        rotated = beginning_with(lines, first_batch - SKIPPED_STEPS, task)
        prompts = write_lines(folder / f"{task.name}-{first_batch}.jsonl", rotated)
        changes = [f"optimizer.lr={LR}", *extra]
        found.ours.append(
            measure(task, steps, model=model, prompts=prompts, runs=folder / "runs", seed=seed, extra=changes)
        )

    if python is None:
        ours(0)
        return found
    prompts = write_lines(folder / f"{task.name}.jsonl", lines)
    told = settings(task, model=model, prompts=prompts, output=folder / "peer", lr=LR, seed=seed)
    with Peer(python, told, folder) as peer:
        check_torch(peer.versions["torch"])
        peer.train(PEER_WARM_UP, cap=WARM_UP_TOKENS)
        batch = PEER_WARM_UP
        for side in turns(effort.pairs):
            if side == "ours":
                ours(batch)
                continue
            batch += steps
            measured, figures = peer.train(steps)
            found.peer.append(measured)
            found.peer_figures.append(figures)
            print(f"peer: {task.name} {measured.rate:,.0f} trained tokens/s", flush=True)
    return found


def check_torch(theirs: str) -> None:
    """Raises UserError if the peer runs on another build of torch than we do."""
    import torch

    if theirs != torch.__version__:
        raise UserError(
            f"the peer has torch {theirs}, we have {torch.__version__}: remove .venv-trl and run "
            "`make setup-trl TORCH_INDEX=<the index that ours came from>`"
        )


def figures_of(found: Found) -> dict[str, Any]:
    """Medians over the runs, and each pair's ratio."""
    names = found.ours[0].figures
    figures: dict[str, Any] = {name: middle([o.figures[name] for o in found.ours]) for name in names}
    if found.peer:
        figures["peer_trained_tokens_per_s"] = statistics.median(m.rate for m in found.peer)
        figures["peer_seconds_per_step"] = statistics.median(m.seconds / m.steps for m in found.peer)
        figures["peer_generate_part"] = statistics.median(
            f["generate_seconds"] / f["seconds"] for f in found.peer_figures
        )
        figures["peer_padding"] = statistics.median(1 - f["real"] / f["positions"] for f in found.peer_figures)
        figures["vs_trl_pairs"] = [float(f"{r:.3g}") for r in pair_ratios([o.measured for o in found.ours], found.peer)]
    return figures


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what is known."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def main() -> int:
    """Measure the tasks and print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer steps: under 240 s on two idle cores")
    options.add_argument("--peer", choices=("trl",), help="measure this beside us, in turn")
    options.add_argument("--task", choices=(*TASKS, "both"), default="both")
    options.add_argument("--steps", type=int, help="steps of each measurement, of both tasks")
    options.add_argument("--pairs", type=int, help="measurements of each side, with --peer")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes of our recipe")
    args = options.parse_args()
    names = list(TASKS) if args.task == "both" else [args.task]
    effort = {name: planned(name, quick=args.quick, peer=args.peer is not None) for name in names}
    effort = {n: Effort(args.steps or e.steps, args.pairs or e.pairs) for n, e in effort.items()}
    try:
        python = ensure_environment() if args.peer else None
        with tempfile.TemporaryDirectory(prefix="end-to-end-") as scratch:
            found = {
                name: run_task(
                    TASKS[name], e, python=python, folder=Path(scratch), seed=args.seed, extra=args.overrides
                )
                for name, e in effort.items()
            }
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    figures = {name: figures_of(f) for name, f in found.items()}
    main_task = figures[names[0]]
    print_result(
        "end_to_end",
        ratios={
            "overlap": main_task["overlap"],
            **{f"overlap_{name}": f["overlap"] for name, f in figures.items()},
            **{
                f"{name}_vs_trl": median_ratio([o.measured for o in f.ours], f.peer)
                for name, f in found.items()
                if f.peer
            },
        },
        figures={
            "sampled_tokens_per_s": main_task["sampled_tokens_per_s"],
            "trained_tokens_per_s": main_task["trained_tokens_per_s"],
            **{f"{name}_{k}": v for name, f in figures.items() for k, v in f.items() if k != "overlap"},
        },
        settings={
            "quick": args.quick,
            "peer": args.peer,
            "steps": {name: e.steps for name, e in effort.items()},
            "pairs": {name: e.pairs for name, e in effort.items()} if args.peer else {},
            "seed": args.seed,
            "overrides": args.overrides,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
