"""Training across a save and a resume, run in each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.config.recipe import Optimizer
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo
from tests.pool.machine import CPU
from tests.train.parity_jobs import tiny_spec
from tests.train.sharded import Part, fill, parts_of
from tests.train.step_jobs import OBJECTIVE, micro_batches, samples

SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1, clip_grad=0.5)


def new_state(
    layout: Layout,
    *,
    changes: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    settings: Optimizer = SETTINGS,
    spec: ModelSpec | None = None,
) -> Any:
    """A trainer of `spec`; without one, of the parity tests' model with `changes`."""
    from moe_asyncrl.train.build import build_train_state

    state = build_train_state(spec or tiny_spec(**changes), layout, CPU, settings, rank=dist.get_rank(), dtype=dtype)
    fill(state.model.chunks, vocab_size=state.model.spec.vocab_size)
    state.optimizer.reload_model_params()
    return state


def one_step(state: Any, step: int) -> tuple[float, float]:
    """(loss, gradient norm) of one update; the data and the rate are functions of the step."""
    from moe_asyncrl.train.step import update

    spec, layout = state.model.spec, state.model.layout
    batches = micro_batches(samples(spec, seed=step), spec, layout, tokens=64, replay=False)
    done = update(
        state.model, state.optimizer, batches, OBJECTIVE, lr=1e-2 / (1 + step), weight_decay=SETTINGS.weight_decay
    )
    return done.loss, done.grad_norm


def info_of(state: Any, step: int) -> CheckpointInfo:
    from moe_asyncrl.train.checkpoint import adam_steps

    return CheckpointInfo(
        step=step,
        version=step,
        adam_steps=adam_steps(state.optimizer),
        cursor=Cursor(watermark=3 * step, done=(3 * step + 5,)),
        counters=Counters(sampled=10 * step, trained=8 * step),
        seed=1,
        recipe_digest="r",
        layout=str(state.model.layout),
        model="m",
    )


def weights(state: Any) -> list[Part]:
    return [
        Part(p.name, p.global_shape, p.where, p.value.detach().clone())
        for chunk in state.model.chunks
        for p in parts_of(chunk)
    ]


def train(
    layout: Layout,
    *,
    steps: tuple[int, ...],
    changes: dict[str, Any] | None = None,
    spec: ModelSpec | None = None,
    resume: str | None = None,
    save: str | None = None,
    then: tuple[int, ...] = (),
    bf16: bool = False,
    wrong_adam_steps: bool = False,
    done: int | None = None,
) -> dict[str, Any]:
    """Train `steps`, from scratch or from the checkpoint at `resume`; save under `save`; train `then`.

    `done`: steps that are done when it saves, if not as many as `steps` has.
    """
    from moe_asyncrl.train import checkpoint

    state = new_state(layout, changes=changes or {}, dtype=torch.bfloat16 if bf16 else torch.float32, spec=spec)
    info = None
    if resume is not None:
        info = checkpoint.load(state, Path(resume))
        if wrong_adam_steps:
            from moe_asyncrl.train.optimizer import forget_moments

            forget_moments(state.optimizer)
    log = [one_step(state, step) for step in steps]
    folder = None
    if save is not None:
        folder = checkpoint.save(state, Path(save), info_of(state, len(steps) if done is None else done), keep=2)
    log += [one_step(state, step) for step in then]
    return {"log": log, "info": info, "weights": weights(state), "folder": str(folder)}
