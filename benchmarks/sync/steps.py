"""Optimizer steps of the real trainer on English text, and what each changed of the weights as they travel.

    python -m benchmarks.sync.steps --warm 100 --updates 10

The text is Python's own manual of topics, which every installation has. Weights and Adam are in float32, as the master
weights of a bfloat16 trainer are; what is kept is their bfloat16 rounding: whole after the warm steps, and of each
step behind them the elements whose bits changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.sync.mixture import BUILD, mixture

LR = 1e-6
SEQUENCE = 129
"""Tokens of a sequence; the first one is not trained."""


@dataclass(frozen=True)
class Taken:
    """What was trained."""

    warm: int
    """Optimizer steps before the first kept weights."""
    updates: int
    """Steps behind them, each kept as a change."""
    tokens: int
    """Trained tokens of a step."""
    lr: float
    experts: int
    changed: tuple[float, ...]
    """Of each kept step: elements whose bits changed, over all elements."""


@dataclass(frozen=True)
class Steps:
    """A folder of them."""

    folder: Path
    taken: Taken

    def base(self) -> dict[str, torch.Tensor]:
        """Weights after the warm steps, bfloat16, by their names in Megatron-Core."""
        return load_file(self.folder / "base.safetensors")

    def apply(self, number: int, weights: dict[str, torch.Tensor]) -> None:
        """Take `weights` (contiguous, bfloat16) in place from `number` steps behind the base to one more."""
        change = load_file(self.folder / f"change-{number}.safetensors")
        for name in sorted(key.removesuffix(".values") for key in change if key.endswith(".values")):
            flat = weights[name].view(torch.int16).view(-1)
            flat[change[f"{name}.positions"].long()] = change[f"{name}.values"]


def open_steps(warm: int, updates: int, experts: int) -> Steps | None:
    """What an earlier run has kept; None if it was something else, or nothing."""
    for folder in sorted(BUILD.glob(f"steps-{experts}-*")):
        path = folder / "taken.json"
        if path.is_file():
            found = json.loads(path.read_text())
            taken = Taken(**{**found, "changed": tuple(found["changed"])})
            if taken.warm >= warm and taken.updates >= updates and taken.lr == LR:
                return Steps(folder, taken)
    return None


def take_steps(
    warm: int, updates: int, experts: int, *, sequences: int, threads: int, stop_after_s: float = float("inf")
) -> Steps | None:
    """Train and keep; the folder takes its name when it is whole.

    None if the warm steps took longer than `stop_after_s`: then the next call goes on from where they are.
    """
    began = time.monotonic()
    trainer = _Trainer(mixture(experts), sequences, threads)
    BUILD.mkdir(parents=True, exist_ok=True)
    resting = BUILD / f"resting-{experts}"
    partial = Path(tempfile.mkdtemp(dir=BUILD, prefix=".partial-"))
    try:
        if resting.is_dir():
            trainer.wake(resting)
        while trainer.done < warm:
            if trainer.done and time.monotonic() - began > stop_after_s:
                trainer.rest(partial / "resting")
                shutil.rmtree(resting, ignore_errors=True)
                os.rename(partial / "resting", resting)
                return None
            trainer.step()
        held = trainer.weights()
        save_file(held, partial / "base.safetensors")
        changed = []
        for number in range(updates):
            trainer.step()
            changed.append(_keep_change(held, trainer.weights(), partial / f"change-{number}.safetensors"))
        taken = Taken(warm, updates, sequences * (SEQUENCE - 1), LR, experts, tuple(changed))
        (partial / "taken.json").write_text(json.dumps(asdict(taken)))
        out = BUILD / f"steps-{experts}-{warm}"
        shutil.rmtree(out, ignore_errors=True)
        os.rename(partial, out)
        shutil.rmtree(resting, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        trainer.close()
    return Steps(out, taken)


def _keep_change(held: dict[str, torch.Tensor], now: dict[str, torch.Tensor], path: Path) -> float:
    """Write which elements of `held` have other bits in `now`, and bring `held` there. Returns their part."""
    change, elements, count = {}, 0, 0
    for name, value in now.items():
        old, new = held[name].view(torch.int16).view(-1), value.view(torch.int16).view(-1)
        positions = (old != new).nonzero().view(-1)
        elements += len(new)
        count += len(positions)
        if len(positions):
            change[f"{name}.positions"] = positions.to(torch.int32)
            change[f"{name}.values"] = new[positions].clone()
            old[positions] = new[positions]
    save_file(change, path)
    return count / elements


class _Trainer:
    """One rank of the real trainer."""

    def __init__(self, path: Path, sequences: int, threads: int) -> None:
        import pydoc_data.topics

        import torch.distributed as dist

        from moe_asyncrl.config.capability import Capabilities
        from moe_asyncrl.config.recipe import Optimizer
        from moe_asyncrl.models.layout import Layout
        from moe_asyncrl.models.spec import ModelSpec
        from moe_asyncrl.models.tokenizer import Tokenizer
        from moe_asyncrl.train.build import build_train_state
        from moe_asyncrl.train.parallel import ParallelRuntime

        torch.set_num_threads(threads)
        self._runtime = ParallelRuntime(Capabilities(), rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        self._runtime.setup(Layout())
        self._spec = ModelSpec.from_hf(path)
        self._state = build_train_state(self._spec, Layout(), Capabilities(), Optimizer(), rank=0, hf_dir=path)
        for inner in _torch_optimizers(self._state.optimizer):
            for group in inner.param_groups:
                # The same arithmetic in one pass over memory in place of sixteen.
                group.update(fused=True, foreach=False)
        text = "\n".join(pydoc_data.topics.topics.values())
        ids = Tokenizer.load(path).encode_answer(text, "the manual", close=False)
        self._sequences = np.asarray(ids[: len(ids) // SEQUENCE * SEQUENCE], np.int32).reshape(-1, SEQUENCE)
        self._order = np.random.default_rng(0).permutation(len(self._sequences))
        self._size = sequences
        self.done = 0

    def step(self) -> None:
        """One optimizer step on the next sequences."""
        from moe_asyncrl.train.batch import Sample
        from moe_asyncrl.train.objective import SupervisedObjective
        from moe_asyncrl.train.sft import micro_batches_of
        from moe_asyncrl.train.step import update

        began = time.perf_counter()
        chosen = [self._order[(self.done * self._size + i) % len(self._order)] for i in range(self._size)]
        trained = np.arange(SEQUENCE) > 0
        weight = 1 / (self._size * (SEQUENCE - 1))
        samples = [Sample(name=f"part {n}", tokens=self._sequences[n], trained=trained, weight=weight) for n in chosen]
        model = self._state.model
        batches = micro_batches_of(model, samples, micro_batch_tokens=self._size * SEQUENCE)
        done = update(model, self._state.optimizer, batches, SupervisedObjective(), lr=LR)
        self.done += 1
        print(f"step {self.done}: loss {done.loss:.3f}, {time.perf_counter() - began:.1f} s", flush=True)

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights as they travel."""
        return {name: value.to(torch.bfloat16).contiguous() for name, value in self._parameters().items()}

    def rest(self, folder: Path) -> None:
        """Write weights and moments, as they lie in memory."""
        folder.mkdir()
        save_file(self._moments(), folder / "moments.safetensors", metadata={"done": str(self.done)})
        save_file(self._parameters(), folder / "weights.safetensors")

    def wake(self, folder: Path) -> None:
        """Go on from what `rest` wrote."""
        with torch.no_grad():
            for name, value in load_file(folder / "weights.safetensors").items():
                self._parameters()[name].copy_(value)
        with safe_open(folder / "moments.safetensors", "pt") as stored:
            for part, inner in enumerate(_torch_optimizers(self._state.optimizer)):
                for number, parameter in enumerate(p for group in inner.param_groups for p in group["params"]):
                    inner.state[parameter] = {
                        kind: stored.get_tensor(f"{part}.{number}.{kind}") for kind in ("exp_avg", "exp_avg_sq", "step")
                    }
            self.done = int(stored.metadata()["done"])

    def _parameters(self) -> dict[str, torch.Tensor]:
        from moe_asyncrl.checkpoint.megatron_names import global_parameters

        model = self._state.model
        found = global_parameters(model.chunks, model.spec, model.layout, 0)
        return {name: value.detach() for name, value in found.items()}

    def _moments(self) -> dict[str, torch.Tensor]:
        found = {}
        for part, inner in enumerate(_torch_optimizers(self._state.optimizer)):
            parameters = [p for group in inner.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                for kind, value in inner.state[parameter].items():
                    found[f"{part}.{number}.{kind}"] = value
        return found

    def close(self) -> None:
        """End the process group."""
        self._runtime.close()


def _torch_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if getattr(part, "optimizer", None) is not None]


def main() -> None:
    """Take the steps once, ahead of the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--warm", type=int, default=100)
    options.add_argument("--updates", type=int, default=10)
    options.add_argument("--experts", type=int, default=6)
    options.add_argument("--sequences", type=int, default=2, help="of 128 trained tokens in each step (default: 2)")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--stop-after-s", type=float, default=float("inf"), help="rest then, to be called again")
    args = options.parse_args()
    found = take_steps(
        args.warm,
        args.updates,
        args.experts,
        sequences=args.sequences,
        threads=args.threads,
        stop_after_s=args.stop_after_s,
    )
    print("resting; call it again" if found is None else found.taken)


if __name__ == "__main__":
    main()
