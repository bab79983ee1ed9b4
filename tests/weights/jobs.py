"""What the trainer's ranks do in the update tests. The model and its publisher live in the workers between calls."""

from __future__ import annotations

import gc
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.hf_export import export_hf
from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.config.recipe import Engine, Weights
from moe_asyncrl.data.messages import Member
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.copy_weights import copy_weights
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.jsonl import JsonlWriter
from moe_asyncrl.train.publish import Publisher
from moe_asyncrl.weights.attempt import Held
from moe_asyncrl.weights.engine_layout import EngineLayout
from tests.engines.epochs import next_epoch
from tests.pool.machine import CPU
from tests.weights.support import UPDATE_S, MemoryControl, make_client

HELD: dict[str, Any] = {}
"""The worker's trainer: chunks, spec, rank, publisher, control."""


def start(
    layout: Layout,
    hf_dir: str,
    members: list[Member],
    *,
    dtype: str = "float32",
    bucket_bytes: int = 1 << 18,
    events: str | None = None,
    kinds: dict[str, str] | None = None,
    pids: dict[str, int] | None = None,
    step_s: float = UPDATE_S,
    start_timeout_s: float = 30.0,
    expected: int | None = None,
    weights: dict[str, Any] | None = None,
    folder: str | None = None,
    joiners: bool = False,
    colocated: bool = False,
) -> None:
    """Build and load the model on this rank, and make its publisher.

    `kinds` and `pids` choose faulty clients; `weights` are fields of the recipe.
    """
    from moe_asyncrl.train.model import build_model

    stop()
    rank = dist.get_rank()
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    control = MemoryControl(list(members))
    chosen, known = dict(kinds or {}), dict(pids or {})

    async def copy(source: Member, target: Member) -> None:
        clients = [EngineClient(m.url, name=m.name, world_size=m.world_size) for m in (source, target)]
        async with clients[0], clients[1]:
            await copy_weights(clients[0], clients[1], host="127.0.0.1", deadline_s=step_s)

    publisher = Publisher(
        chunks,
        spec,
        layout,
        rank,
        weights=Weights(timeout_s=step_s, **(weights or {})),
        engine=Engine(
            count=expected or len(members),
            dtype=dtype,  # type: ignore[arg-type]
            start_timeout_s=start_timeout_s,
            colocated=colocated,
        ),
        connect=lambda m: make_client(chosen.get(m.name, "plain"), m, known.get(m.name, 0)) if rank == 0 else None,  # type: ignore[arg-type,return-value]
        control=control if rank == 0 else None,
        events=JsonlWriter(Path(events)) if events and rank == 0 else None,
        join_control=control if rank == 0 and joiners else None,
        copy=copy if rank == 0 else None,
        bucket_bytes=bucket_bytes,
        epoch=next_epoch(),
        folder=None if folder is None else Path(folder),
        layout_of=lambda m: EngineLayout(tp=m.world_size, ep=m.world_size),
        watch=lambda phase, turn: HELD["strike"](phase, turn) if "strike" in HELD else None,
    )
    HELD.update(kinds=chosen, pids=known)
    HELD.update(chunks=chunks, spec=spec, layout=layout, rank=rank, publisher=publisher, control=control, source=hf_dir)


def stop() -> None:
    """Close the publisher and forget the model."""
    if "publisher" in HELD:
        HELD["publisher"].close()
    HELD.clear()


def set_members(members: list[Member], kinds: dict[str, str] | None = None, pids: dict[str, int] | None = None) -> None:
    """Engines that are there from now on; `kinds` and `pids` choose faulty clients."""
    HELD["kinds"] |= kinds or {}
    HELD["pids"] |= pids or {}
    HELD["control"].members = list(members)


def wait_for_commits(count: int, timeout_s: float = 60.0) -> list[Any]:
    """What the first rank has committed once it is so many; empty on the others."""
    if dist.get_rank():
        return []
    end = time.monotonic() + timeout_s
    while len(HELD["control"].commits) < count and time.monotonic() < end:
        time.sleep(0.1)
    return list(HELD["control"].commits)


def commits() -> list[Any]:
    """What the first rank has committed."""
    return list(HELD["control"].commits)


def perturb(step: int, scale: float = 0.02) -> None:
    """Move every weight, the same on all ranks that hold a copy of it."""
    with torch.no_grad():
        for name, value in _parameters().items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            value.add_(scale * torch.randn(value.shape, generator=generator))


def nudge(step: int, fraction: float = 0.01) -> None:
    """Move about one element in a hundred, the same on all ranks that hold a copy of it."""
    with torch.no_grad():
        for name, value in _parameters().items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} nudge".encode()))
            value.add_(0.05 * (torch.rand(value.shape, generator=generator) < fraction))


def forget() -> None:
    """The next update is a full one."""
    HELD["publisher"]._held = Held()


def swap_experts() -> None:
    """Exchange the second matrices of the first two experts of the last layer, where they live."""
    layer = HELD["spec"].num_layers - 1
    names = [f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.linear_fc2.weight" for e in (0, 1)]
    found = _parameters()
    if names[0] in found:
        with torch.no_grad():
            a, b = found[names[0]], found[names[1]]
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


def age_expert(step: int, scale: float = 0.02) -> None:
    """Take one matrix of one expert back to what it was before `perturb(step)`; other experts stay."""
    name = f"decoder.layers.{HELD['spec'].num_layers - 1}.mlp.experts.local_experts.1.linear_fc1.weight"
    found = _parameters()
    if name in found:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        with torch.no_grad():
            found[name].sub_(scale * torch.randn(found[name].shape, generator=generator))


def export(out: str) -> None:
    """Write the model as it is now."""
    export_hf(HELD["chunks"], HELD["spec"], HELD["layout"], out, source_hf_dir=HELD["source"], dtype=torch.float32)


def rest() -> str:
    """Let the trainer have its turn; the error, if there is one."""
    try:
        HELD["publisher"].rest()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def publish(version: int) -> dict[str, Any]:
    """One update; the report, or the error with the time that it took."""
    began = time.monotonic()
    try:
        report = HELD["publisher"].publish(version)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "took": time.monotonic() - began}
    return {
        "version": report.version,
        "seconds": report.seconds,
        "pause": report.pause_seconds,
        "bytes": report.bytes,
        "buckets": report.buckets,
        "engines": report.engines,
        "lost": report.lost,
        "took": time.monotonic() - began,
        "transport": report.transport,
        "delta": report.delta,
        "changed": report.changed,
    }


def break_parameter(rank: int) -> None:
    """Rename a parameter on one rank, so that it cannot gather."""
    if dist.get_rank() == rank:
        chunk = HELD["chunks"][0]
        layer = chunk.decoder.layers[0]
        layer.self_attention.linear_proj.weight = torch.nn.Parameter(torch.zeros(3, 3))


def publish_many(first: int, count: int, change: str = "") -> dict[str, Any]:
    """`count` updates in a row; seconds of each, and what this process holds before and after."""
    process = psutil.Process()
    HELD["publisher"].publish(first)
    seconds, before, memory = [], _holdings(process), []
    for version in range(first + 1, first + count):
        if change:
            globals()[change](step=version)
        seconds.append(HELD["publisher"].publish(version).seconds)
        memory.append(process.memory_info().rss)
    return {"seconds": seconds, "memory": memory, "before": before, "after": _holdings(process)}


def _holdings(process: psutil.Process) -> dict[str, int]:
    gc.collect()
    return {
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "python_threads": threading.active_count(),
        "rss": process.memory_info().rss,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "pid": os.getpid(),
    }


def _parameters() -> dict[str, torch.nn.Parameter]:
    return global_parameters(HELD["chunks"], HELD["spec"], HELD["layout"], HELD["rank"])
