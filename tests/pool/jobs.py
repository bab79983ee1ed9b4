"""Small functions that the pool's own tests run in its workers."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def rank_and_sum(value: int) -> tuple[int, int, int]:
    """This worker's rank, the sum of value + rank over the ranks, and the process id."""
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getpid()


def raise_on(rank: int) -> int:
    """Raise on one rank while the others wait in a collective."""
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()
    return dist.get_rank()


def hang_on(rank: int) -> int:
    """Never come back on one rank."""
    while dist.get_rank() == rank:
        time.sleep(0.05)
    return dist.get_rank()


def die_on(rank: int) -> int:
    """End the process of one rank."""
    if dist.get_rank() == rank:
        os._exit(7)
    return dist.get_rank()
