"""Trajectories as a run records them, sampled by a real engine."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.data.trajectory import (
    Identity,
    PolicyAsked,
    RoutingRun,
    SamplingParams,
    Segment,
    Trajectory,
)
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.rollout.assemble import mask_rows
from tests.engines.fixtures import TestEngine

VERSION = 5
"""What the engine's weights are called here."""


def sampled(engine: TestEngine, sampling: SamplingParams, *, count: int = 16, seed: int = 3) -> list[Trajectory]:
    """Real completions, of uneven lengths, as trajectories of version `VERSION`."""
    draw = np.random.default_rng(seed)
    batch = [
        GenerateRequest(
            rid=f"mismatch-{seed}-{i}",
            input_ids=draw.integers(4, 512, size=int(draw.integers(1, 12))),
            sampling=msgspec.structs.replace(sampling, max_new_tokens=int(draw.integers(12, 28))),
            version=-1,
            ignore_eos=True,
        )
        for i in range(count)
    ]

    async def go() -> list[Trajectory]:
        async with engine.client() as client:
            done = await client.generate(batch, deadline_s=120, mask=sampling.truncates)
        return [trajectory(request, completion) for request, completion in zip(batch, done, strict=True)]

    return asyncio.run(go())


def trajectory(request: GenerateRequest, done: Completion) -> Trajectory:
    """One completion with all that it reported."""
    prompt = np.asarray(request.input_ids, dtype=np.int32)
    output = np.asarray(done.output_ids, dtype=np.int32)
    n, t = len(prompt), len(prompt) + len(output)
    mask = np.arange(t) >= n
    kept, support = mask_rows(done, n)
    return Trajectory(
        identity=Identity(trajectory=request.rid, prompt="test", index=0),
        policy=PolicyAsked(base_version=VERSION),
        segments=(
            Segment(start=0, end=n, role="user"),
            Segment(start=n, end=t, role="policy", sampling=request.sampling),
        ),
        tokens=np.concatenate([prompt, output]),
        loss_mask=mask,
        logprobs=np.concatenate([np.full(n, np.nan, np.float32), done.logprobs]).astype(np.float32),
        weight_version=np.where(mask, VERSION, -1).astype(np.int32),
        support_logprobs=support,
        sampling_mask=kept,
        routing_experts=done.experts,
        routing_runs=(RoutingRun(start=0, end=t - 1, version=VERSION, source="sampled"),),
    )


def moved_weights(model: Path, out: Path, *, scale: float, seed: int = 1) -> Path:
    """An HF directory whose matrices are those of `model` with noise of `scale` standard deviations: an update."""
    out.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    for path in model.glob("*.safetensors"):
        weights = load_file(path)
        for name in sorted(weights):
            value = weights[name]
            if value.dim() > 1:
                value += scale * float(value.std()) * torch.randn(value.shape, generator=generator)
        save_file(weights, out / path.name, metadata={"format": "pt"})
    return out


def with_rows(t: Trajectory, rows: np.ndarray) -> Trajectory:
    return dataclasses.replace(t, routing_experts=np.ascontiguousarray(rows))
