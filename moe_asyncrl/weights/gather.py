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
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.agree import agree, collective_device
from moe_asyncrl.weights.gather_plan import BucketPlan, Message, plan_gather

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
    where they live. Memory beyond the model: one bucket on the first rank (twice its column-sharded part), this rank's
    part of it on the others; a bucket has at most `max_bytes`, or holds one larger parameter alone. Tensors of one
    Megatron parameter (q, k, v; gate and up of an expert) share a bucket.

    A rank that cannot go on closes the iterator (use `contextlib.closing`), and all others raise. When the iterator
    ends, every rank has taken every bucket.

    Raises:
        UserError: a parameter is missing or has the wrong shape, or another rank stopped.
        DeadlineExceeded: a rank's part of a bucket did not come within `timeout_s`.
    """
    if max_bytes < 1:
        raise UserError(f"a weight bucket must hold at least 1 byte, not {max_bytes}")
    with agree("preparing the weights", group=group):
        plan = plan_gather(spec, layout, max(1, max_bytes // dtype.itemsize))
        _check_params(local_params, spec, layout, rank)
    device = next(iter(local_params.values())).device
    try:
        for bucket in plan:
            _go_on(rank, layout, group, stop=False)
            flat = _gather(bucket, local_params, rank, dtype, device, group, timeout_s)
            yield HfBucket(bucket.tensors, dtype, flat)
            del flat
        _go_on(rank, layout, group, stop=False)
    except GeneratorExit:
        _go_on(rank, layout, group, stop=True)
        raise


def _check_params(local_params: Mapping[str, torch.Tensor], spec: ModelSpec, layout: Layout, rank: int) -> None:
    for shard in rank_shards(spec, layout, rank):
        found = local_params.get(shard.entry.name)
        if found is None:
            raise UserError(f"rank {rank}: Megatron parameter {shard.entry.name} is missing")
        if tuple(found.shape) != shard.shape:
            raise UserError(
                f"rank {rank}: Megatron parameter {shard.entry.name} has shape {list(found.shape)}, "
                f"the layout needs {list(shard.shape)}"
            )


def _go_on(rank: int, layout: Layout, group: dist.ProcessGroup | None, *, stop: bool) -> None:
    """One agreement of all ranks: raises UserError if another one stops."""
    if layout.world_size == 1:
        return
    flag = torch.tensor([rank if stop else layout.world_size], dtype=torch.int64, device=collective_device(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    if not stop and int(flag) < layout.world_size:
        raise UserError(f"rank {int(flag)} stopped while the weights were being gathered; see its log")


def _gather(
    bucket: BucketPlan,
    local_params: Mapping[str, torch.Tensor],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    timeout_s: float,
) -> torch.Tensor | None:
    if rank != 0:
        mine = [(tag, m) for tag, m in enumerate(bucket.messages) if m.owner == rank]
        payloads = [_pack(message, local_params, dtype, device) for _, message in mine]
        transfers = [(payload, 0, tag) for payload, (tag, _) in zip(payloads, mine, strict=True)]
        _exchange(dist.isend, transfers, bucket, group, timeout_s)
        return None
    flat = torch.empty(bucket.numel, dtype=dtype, device=device)
    arriving: list[tuple[torch.Tensor, int, int]] = []
    to_place: list[tuple[Message, torch.Tensor]] = []
    for tag, message in enumerate(bucket.messages):
        if message.owner == 0:
            for piece in message.pieces:
                local = local_params[piece.shard.entry.name].detach()
                _hf_view(flat, piece.tensor_start, piece.block.hf)[piece.block.hf_slices].copy_(
                    local[piece.block.local_slices]
                )
            continue
        if message.start is not None:
            into = flat[message.start : message.start + message.numel]
        else:
            into = torch.empty(message.numel, dtype=dtype, device=device)
            to_place.append((message, into))
        arriving.append((into, message.owner, tag))
    _exchange(dist.irecv, arriving, bucket, group, timeout_s)
    for message, staged in to_place:
        start = 0
        for piece in message.pieces:
            target = _hf_view(flat, piece.tensor_start, piece.block.hf)[piece.block.hf_slices]
            target.copy_(staged[start : start + target.numel()].view(target.shape))
            start += target.numel()
    return flat


def _pack(
    message: Message, local_params: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    payload = torch.empty(message.numel, dtype=dtype, device=device)
    start = 0
    for piece in message.pieces:
        source = local_params[piece.shard.entry.name].detach()[piece.block.local_slices]
        payload[start : start + source.numel()].view(source.shape).copy_(source)
        start += source.numel()
    return payload


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
    verb = "to send" if op is dist.isend else "for"
    peers = ", ".join(str(p) for p in sorted({peer for _, peer, _ in transfers}))
    try:
        for work in dist.batch_isend_irecv(ops):
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"waited up to {timeout_s:g} s {verb} weights {bucket.names} (rank {peers}): {error}"
        ) from error


def _hf_view(flat: torch.Tensor, start: int, tensor: HfTensor) -> torch.Tensor:
    return flat[start : start + tensor.numel].view(tensor.shape)
