"""All ranks of a group succeed together or fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import UserError


@contextmanager
def agree(what: str, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the body on every rank, then compare: if it raised anywhere, it raises everywhere.

    The rank that failed keeps its own error; the others get a UserError that names the lowest failed rank. The body
    must not hold a collective that another rank could miss. Without torch.distributed it is the body alone.
    """
    if not dist.is_initialized():
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    failed = torch.tensor([rank if error is not None else size], dtype=torch.int64, device=collective_device(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MIN, group=group)
    if error is not None:
        raise error
    if int(failed) < size:
        raise UserError(f"{what} failed on rank {int(failed)}; see that rank's log")


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must live for this group's collectives: the current GPU for NCCL, the CPU for gloo."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
