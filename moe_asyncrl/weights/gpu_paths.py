"""The transport's GPU-only path as a small check, run by `moe_asyncrl.cluster.gpu_check`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import UserError

BYTES = 64 << 20


def pattern(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that no shift or truncation maps onto themselves, uint8 [size]."""
    index = torch.arange(size, device=device)
    return ((index * 31 + index // 251) % 256).to(torch.uint8)


def broadcast_rank(rank: int, ranks: int, backend: str, size: int, rendezvous: str) -> None:
    """Rank 0 broadcasts `size` bytes; the others compare all of them. Two broadcasts are in flight at once."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        expected = pattern(size, device)
        halves = [half.clone() if rank == 0 else torch.zeros_like(half) for half in expected.chunk(2)]
        for work in [dist.broadcast(half, src=0, async_op=True) for half in halves]:
            work.wait()
        if not torch.equal(torch.cat(halves), expected):
            raise UserError(f"rank {rank} received other bytes than rank 0 sent")
    finally:
        dist.destroy_process_group()


def broadcast(ranks: int, backend: str, size: int) -> None:
    """Spawn `ranks` processes around `broadcast_rank`. Raises if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, backend, size, str(Path(folder) / "rendezvous"))
        spawn(broadcast_rank, args=arguments, nprocs=ranks, join=True)  # type: ignore[no-untyped-call]


def nccl_broadcast(capabilities: Capabilities) -> str:
    """64 MiB from one GPU to all others. A single GPU only shows that NCCL starts: two ranks cannot share one."""
    broadcast(capabilities.gpu_count, "nccl", BYTES)
    note = "; one GPU: NCCL starts, nothing crossed a link" if capabilities.gpu_count == 1 else ""
    return f"{BYTES >> 20} MiB over {capabilities.gpu_count} ranks, all bytes equal{note}"
