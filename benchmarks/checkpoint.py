"""How long training stands still for a checkpoint: written while it goes on, against waited for.

    python -m benchmarks.checkpoint --quick

One process trains a random mixture of experts on random tokens and saves it, in turn, both ways; each way ends with the
checkpoint complete on the disk. The pause is all the time in which no step runs: the copy, the looks at whether
it is written, and the completion.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import print_result

TOKENS = 256
STEPS = 3
"""Steps between two saves, in which nothing is written."""


class Trainer:
    """A model with its optimizer, on one process."""

    def __init__(self, path: Path, sizes: dict[str, int]) -> None:
        import torch
        import torch.distributed as dist

        from moe_asyncrl.config.capability import Capabilities
        from moe_asyncrl.config.recipe import Optimizer
        from moe_asyncrl.models.layout import Layout
        from moe_asyncrl.models.tiny import make_tiny_model
        from moe_asyncrl.train.build import build_train_state
        from moe_asyncrl.train.parallel import ParallelRuntime

        torch.set_num_threads(1)
        self.runtime = ParallelRuntime(Capabilities(), rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        self.runtime.setup(Layout())
        self.spec = make_tiny_model(path / "model", "qwen3_moe", 0, **sizes)
        self.state = build_train_state(self.spec, Layout(), Capabilities(), Optimizer(), rank=0, hf_dir=path / "model")
        self.parameters = sum(p.numel() for chunk in self.state.model.chunks for p in chunk.parameters())
        self.done = 0

    def step(self) -> float:
        """One update; its seconds."""
        from moe_asyncrl.train.batch import Sample
        from moe_asyncrl.train.objective import SupervisedObjective
        from moe_asyncrl.train.sft import micro_batches_of
        from moe_asyncrl.train.step import update

        began = time.perf_counter()
        tokens = np.random.default_rng(self.done).integers(0, self.spec.vocab_size, TOKENS + 1).astype(np.int32)
        sample = Sample(name="random", tokens=tokens, trained=np.arange(TOKENS + 1) > 0, weight=1 / TOKENS)
        batches = micro_batches_of(self.state.model, [sample], micro_batch_tokens=TOKENS)
        update(self.state.model, self.state.optimizer, batches, SupervisedObjective(), lr=1e-4, weight_decay=0.0)
        self.done += 1
        return time.perf_counter() - began

    def info(self) -> Any:
        """What stands beside the weights."""
        from moe_asyncrl.data.messages import Counters, Cursor
        from moe_asyncrl.train.checkpoint import adam_steps
        from moe_asyncrl.train.checkpoint_folder import CheckpointInfo

        return CheckpointInfo(
            step=self.done,
            version=self.done,
            adam_steps=adam_steps(self.state.optimizer),
            cursor=Cursor(),
            counters=Counters(),
            seed=0,
            recipe_digest="",
            layout="single",
            model="",
        )


def waited_for(trainer: Trainer, folder: Path) -> float:
    """Save and wait; seconds without a step."""
    from moe_asyncrl.train import checkpoint

    began = time.perf_counter()
    checkpoint.save(trainer.state, folder, trainer.info(), keep=1)
    return time.perf_counter() - began


def trained_through(trainer: Trainer, folder: Path) -> tuple[float, list[float], int]:
    """Save while training; seconds without a step, the steps meanwhile, and the bytes written."""
    from moe_asyncrl.train import checkpoint

    began = time.perf_counter()
    begun = checkpoint.begin(trainer.state, folder, trainer.info())
    paused = time.perf_counter() - began
    steps = []
    while True:
        began = time.perf_counter()
        written = begun.writing.all_written()
        if written:
            checkpoint.finish(begun, keep=1)
        paused += time.perf_counter() - began
        if written:
            return paused, steps, begun.writing.bytes
        steps.append(trainer.step())


def main() -> None:
    """Measure pairs, print the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="smaller and fewer pairs: under 60 s on two cores")
    options.add_argument("--folder", type=Path, help="disk to write to (default: that of temporary files)")
    args = options.parse_args()
    pairs = 4 if args.quick else 8
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4 if args.quick else 8,
        "num_experts": 16,
        "moe_intermediate_size": 512,
    }
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as scratch:
        trainer = Trainer(Path(scratch), sizes)
        waited, paused, quiet, meanwhile, size = [], [], [], [], 0
        trainer.step()  # its first one prepares
        waited_for(trainer, Path(scratch) / "first")
        for _ in range(pairs):
            quiet += [trainer.step() for _ in range(STEPS)]
            waited.append(waited_for(trainer, Path(scratch) / "waited"))
            quiet += [trainer.step() for _ in range(STEPS)]
            pause, steps, size = trained_through(trainer, Path(scratch) / "through")
            paused.append(pause)
            meanwhile += steps
        trainer.runtime.close()
    print_result(
        "checkpoint",
        ratios={
            "pause_vs_waiting": statistics.median(a / b for a, b in zip(paused, waited, strict=True)),
            "step_while_writing_vs_quiet": statistics.median(meanwhile) / statistics.median(quiet),
        },
        figures={
            "pause_s": statistics.median(paused),
            "waiting_s": statistics.median(waited),
            "quiet_step_s": statistics.median(quiet),
            "steps_while_writing": len(meanwhile) / pairs,
            "mib": size / 2**20,
        },
        settings={"quick": args.quick, "pairs": pairs, "parameters": trainer.parameters, **sizes},
    )


if __name__ == "__main__":
    main()
