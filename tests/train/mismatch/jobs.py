"""What the mismatch tests run in a worker: a real Megatron model over HF directories, one for each version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.mismatch.causes import Mismatch, take_apart
from moe_asyncrl.train.mismatch.lab import Lab, Setting
from moe_asyncrl.train.mismatch.tokens import tokens_from
from tests.pool.machine import CPU


def taken_apart(
    layout: Layout,
    *,
    given: list[Trajectory],
    sources: dict[int, str],
    evaluated: int,
    temperature: float = 1.0,
    replay: bool = True,
    engine_dtype: str = "float32",
) -> Mismatch:
    """The mismatch of recorded trajectories under the weights of version `evaluated`."""
    from moe_asyncrl.checkpoint.hf_load import load_hf
    from moe_asyncrl.train.build import build_model_on_rank

    spec = ModelSpec.from_hf(sources[evaluated])

    def build(dtype: torch.dtype) -> Any:
        return build_model_on_rank(spec, layout, CPU, rank=dist.get_rank(), dtype=dtype, distributed_optimizer=False)

    lab = Lab(
        tokens_from(given),
        Setting(
            temperature=temperature,
            replay=replay,
            trainer_dtype=torch.float32,
            engine_dtype=getattr(torch, engine_dtype),
            micro_batch_tokens=64,
        ),
        build(torch.float32),
        {version: Path(path) for version, path in sources.items()},
        evaluated,
        load=lambda model, path: load_hf(model.chunks, spec, layout, path, rank=dist.get_rank()),
        build=build,
    )
    return take_apart(lab)
