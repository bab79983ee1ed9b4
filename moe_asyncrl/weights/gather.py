"""The model's HF tensors in bounded pieces, in one order on every rank, put together on the first rank.

Export and weight updates both read the trainer's weights through this. All ranks of the trainer move in step: before
each bucket they agree to go on, so that an error on one of them stops the others within a bucket instead of leaving
them in a collective that nobody joins.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.agree import agree, lowest_failed
from moe_asyncrl.weights.gather_plan import BucketPlan, Message, plan_gather
from moe_asyncrl.weights.pack import parameter_problem

DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HfBucket:
    """Whole HF tensors, back to back in one flat buffer."""

    tensors: tuple[HfTensor, ...]
    """Names and shapes, in the order of the buffer; the same on every rank."""
    dtype: torch.dtype
    flat: torch.Tensor | None
    """[sum of numel], contiguous, owned by the caller; None on every rank but the first."""

    def items(self) -> list[tuple[str, torch.Tensor | None]]:
        """(HF name, view into `flat` of the tensor's shape); the view is None where `flat` is."""
        found: list[tuple[str, torch.Tensor | None]] = []
        start = 0
        for tensor in self.tensors:
            view = None if self.flat is None else self.flat[start : start + tensor.numel].view(tensor.shape)
            found.append((tensor.name, view))
            start += tensor.numel
        return found


def iter_hf_tensors(
    local_params: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    max_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout_s: float = 600.0,
) -> Generator[HfBucket, None, None]:
    """Every HF tensor of the model exactly once, in export order. Collective over the trainer's `group`.

    `group` has the layout's ranks in the layout's order; its first rank collects. `local_params` are this rank's
    parameters by canonical global name (`checkpoint.megatron_names.global_parameters`). Values are converted to `dtype`
    where they live; a tensor with a type of its own (`HfTensor.dtype`) to that one, in another bucket. Memory beyond
    the model: one bucket on the first rank (twice its column-sharded part), this rank's part of it on the others; a
    bucket has at most `max_bytes`, or holds one larger parameter alone. Tensors of one Megatron parameter (q, k, v;
    gate and up of an expert) share a bucket.

    A rank that cannot go on closes the iterator (use `contextlib.closing`), and all others raise. When the iterator
    ends, every rank has taken every bucket.

    Raises:
        UserError: a parameter is missing or has the wrong shape, or another rank stopped.
        DeadlineExceeded: a rank's part of a bucket did not come within `timeout_s`, or its process ended.
    """
    if max_bytes < 1:
        raise UserError(f"a weight bucket must hold at least 1 byte, not {max_bytes}")
    with agree("preparing the weights", group=group):
        plan = plan_gather(spec, layout, max(1, max_bytes // dtype.itemsize))
        if problem := parameter_problem(local_params, spec, layout, rank):
            raise UserError(f"rank {rank}: {problem}")
    device = next(iter(local_params.values())).device
    try:
        for bucket in plan:
            _go_on(rank, layout, group, stop=False)
            kept = dtype if bucket.dtype is None else getattr(torch, bucket.dtype)
            flat = _gather(bucket, local_params, rank, kept, device, group, timeout_s)
            yield HfBucket(bucket.tensors, kept, flat)
            del flat
        _go_on(rank, layout, group, stop=False)
    except GeneratorExit:
        _go_on(rank, layout, group, stop=True)
        raise


def _go_on(rank: int, layout: Layout, group: dist.ProcessGroup | None, *, stop: bool) -> None:
    """One agreement of all ranks: raises UserError if another one stops."""
    if layout.world_size == 1:
        return
    first = lowest_failed(rank if stop else None, "gathering the weights", group)
    if not stop and first is not None:
        raise UserError(f"rank {first} stopped while the weights were being gathered; see its log")


def _gather(
    bucket: BucketPlan,
    local_params: Mapping[str, torch.Tensor],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    timeout_s: float,
) -> torch.Tensor | None:
    def empty(elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=device)

    transfers: list[tuple[torch.Tensor, int, int]] = []
    if rank != 0:
        for tag, message in enumerate(bucket.messages):
            if message.owner == rank:
                payload = empty(message.numel)
                pack(message, local_params, payload)
                transfers.append((payload, 0, tag))
        _exchange(dist.isend, transfers, bucket, group, timeout_s)
        return None
    flat = empty(bucket.numel)
    staged: list[tuple[Message, torch.Tensor]] = []
    for tag, message in enumerate(bucket.messages):
        if message.start is not None:
            into = flat[message.start : message.start + message.numel]
        else:
            into = empty(message.numel)
            staged.append((message, into))
        if message.owner == 0:
            pack(message, local_params, into)
        else:
            transfers.append((into, message.owner, tag))
    _exchange(dist.irecv, transfers, bucket, group, timeout_s)
    for message, payload in staged:
        place(message, payload, flat)
    return flat


def pack(message: Message, local_params: Mapping[str, torch.Tensor], payload: torch.Tensor) -> None:
    """Copy the message's pieces out of the owner's parameters into `payload` [numel], converting to its dtype."""
    start = 0
    for piece in message.pieces:
        source = piece.block.to_hf(local_params[piece.shard.entry.name].detach()[piece.block.local_slices])
        payload[start : start + source.numel()].view(source.shape).copy_(source)
        start += source.numel()


def place(message: Message, payload: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy the pieces of `payload` to where they lie in the bucket's buffer `flat`."""
    start = 0
    for piece in message.pieces:
        tensor = piece.block.hf
        whole = flat[piece.tensor_start : piece.tensor_start + tensor.numel].view(tensor.shape)
        target = whole[piece.block.hf_slices]
        target.copy_(payload[start : start + target.numel()].view(target.shape))
        start += target.numel()


def _exchange(
    op: Callable[..., Any],
    transfers: Sequence[tuple[torch.Tensor, int, int]],
    bucket: BucketPlan,
    group: dist.ProcessGroup | None,
    timeout_s: float,
) -> None:
    """Run the (tensor, peer, tag) transfers together and wait for all. Bytes travel, so that any dtype does."""
    if not transfers:
        return
    ops = [
        dist.P2POp(op, tensor.view(torch.uint8), group=group, group_peer=peer, tag=tag)
        for tensor, peer, tag in transfers
    ]
    peers = ", ".join(str(p) for p in sorted({peer for _, peer, _ in transfers}))
    try:
        for work in dist.batch_isend_irecv(ops):
            work.wait(timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        raise DeadlineExceeded(
            f"the exchange of weights {bucket.names} with rank {peers} failed or took over {timeout_s:g} s: {error}"
        ) from error
