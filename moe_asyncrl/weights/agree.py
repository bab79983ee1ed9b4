"""All ranks of a group succeed together or fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import DeadlineExceeded, UserError


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
    first = lowest_failed(dist.get_rank(group) if error is not None else None, what, group)
    if error is not None:
        raise error
    if first is not None:
        raise UserError(f"{what} failed on rank {first}; see that rank's log")


def lowest_failed(failed: int | None, what: str, group: dist.ProcessGroup | None = None) -> int | None:
    """Collective: each rank gives its number if it failed, else None; all get the lowest number given, or None.

    Raises DeadlineExceeded if a rank does not come within the group's time limit.
    """
    size = dist.get_world_size(group)
    number = torch.tensor([size if failed is None else failed], dtype=torch.int64, device=collective_device(group))
    try:
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group)
        lowest = int(number)
    except (RuntimeError, dist.DistError) as error:
        raise DeadlineExceeded(f"{what}: not all {size} ranks reached the same point in time ({error})") from error
    return lowest if lowest < size else None


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must live for this group's collectives: the current GPU for NCCL, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
