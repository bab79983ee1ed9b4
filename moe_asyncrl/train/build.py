"""From a model directory to a trainer: model, gradients' buffers, replay and optimizer on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.config.recipe import Optimizer as OptimizerSettings
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.passes import ModelOnRank, set_gradient_reduction

Recompute = Literal["off", "selective", "full"]


@dataclass(frozen=True)
class TrainState:
    """What training changes: the weights on this rank and the optimizer over them."""

    model: ModelOnRank
    optimizer: Any


def build_model_on_rank(
    spec: ModelSpec,
    layout: Layout,
    capabilities: Capabilities,
    *,
    rank: int,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "off",
    distributed_optimizer: bool = True,
    hf_dir: str | Path | None = None,
    **build: Any,
) -> ModelOnRank:
    """Build this rank's chunks, load `hf_dir` into them if given, wrap them, and attach the replay.

    Process groups must be those of `layout`. `build` goes on to `build_model`.

    Raises:
        UserError: the model does not fit the layout, or the directory does not hold it.
    """
    from moe_asyncrl.train.model import build_model, wrap_ddp
    from moe_asyncrl.train.replay_hooks import attach_replay

    if recompute != "off":
        build["recompute"] = recompute
    chunks = build_model(spec, layout, capabilities, dtype=dtype, **build)
    device = torch.device("cuda", torch.cuda.current_device()) if capabilities.cuda else torch.device("cpu")
    chunks = [chunk.to(device) for chunk in chunks]
    if hf_dir is not None:
        from moe_asyncrl.checkpoint.hf_load import load_hf

        load_hf(chunks, spec, layout, hf_dir, rank=rank)
    model = ModelOnRank(
        spec=spec,
        layout=layout,
        rank=rank,
        chunks=chunks,
        ddp=wrap_ddp(chunks, distributed_optimizer=distributed_optimizer),
        replay=attach_replay(chunks, spec, layout, pp_rank=layout.coordinates(rank).pp, rank=rank),
        device=device,
    )
    set_gradient_reduction(model)
    return model


def build_train_state(
    spec: ModelSpec,
    layout: Layout,
    capabilities: Capabilities,
    settings: OptimizerSettings,
    *,
    rank: int,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "off",
    hf_dir: str | Path | None = None,
    **build: Any,
) -> TrainState:
    """`build_model_on_rank` and an optimizer over it. Raises `UserError` as that does."""
    from moe_asyncrl.train.optimizer import make_optimizer

    model = build_model_on_rank(
        spec, layout, capabilities, rank=rank, dtype=dtype, recompute=recompute, hf_dir=hf_dir, **build
    )
    return TrainState(model, make_optimizer(model.ddp, settings, dtype=dtype))
