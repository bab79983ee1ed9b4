"""Forward and backward passes over packed micro-batches, on any layout, by Megatron-Core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.replay.controller import Mode, ReplayController, ReplayStats
from moe_asyncrl.replay.rows import ReplayMismatch, padding_rows
from moe_asyncrl.train.batch import MicroBatch, RouterShape

LossOf = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Any]]]
"""Logits [1, n, V / tp] and their micro-batch -> a scalar, and what the caller gets back. Runs on the last stage."""


@dataclass(frozen=True)
class ModelOnRank:
    """This rank's part of the model, and where it stands."""

    spec: ModelSpec
    layout: Layout
    rank: int
    chunks: list[Any]
    """`GPTModel`s, unwrapped."""
    ddp: list[Any]
    """The same inside Megatron-Core's DistributedDataParallel."""
    replay: ReplayController | None
    device: torch.device

    @property
    def pp_rank(self) -> int:
        """Pipeline rank."""
        return self.layout.coordinates(self.rank).pp

    @property
    def has_last_stage(self) -> bool:
        """Whether logits come out here."""
        return any(chunk.post_process for chunk in self.chunks)

    @property
    def vocabulary(self) -> range | None:
        """Token ids of the logits that come out here, those of padding included; None off the last stage."""
        if not self.has_last_stage:
            return None
        tp = self.layout.tp
        part = self.spec.padded_vocab_size(tp) // tp
        first = self.layout.coordinates(self.rank).tp * part
        return range(first, first + part)

    @property
    def counts(self) -> bool:
        """True on the ranks whose micro-batch sums are counted: each position of a replica stands on one of them."""
        return self.has_last_stage and self.layout.coordinates(self.rank).tp == 0

    @property
    def counts_trajectories(self) -> bool:
        """True on the one of them, in each replica, that counts what is said of whole trajectories."""
        return self.counts and self.layout.coordinates(self.rank).cp == 0

    @property
    def router_shape(self) -> RouterShape | None:
        """What routing rows look like; None for a dense model."""
        s = self.spec
        if not s.is_moe:
            return None
        own = None if self.replay is None else self.replay.layers
        return RouterShape(layers=s.num_moe_layers, experts=s.num_experts, top_k=s.experts_per_token, own=own)


def run_passes(
    model: ModelOnRank,
    batches: Sequence[MicroBatch],
    loss_of: LossOf,
    *,
    forward_only: bool,
    mode: Mode = "off",
    allow_missing: bool = False,
) -> tuple[list[dict[str, Any]], ReplayStats | None]:
    """Run all micro-batches; afterwards, unless `forward_only`, gradients are summed over ranks for the optimizer.

    The gradient is that of the sum of all losses over micro-batches and data-parallel ranks: nothing is divided by a
    number of tokens or micro-batches, since the token weights already did.

    Args:
        model: this rank's part.
        batches: as many on every rank.
        loss_of: called once for each micro-batch on the last pipeline stage.
        forward_only: no gradients.
        mode: what routers do with the rows of the micro-batches; `record` (without gradients) routes live, and puts
            what was chosen into the micro-batches, as rows for later passes.
        allow_missing: route tokens without a row live.

    Returns:
        What `loss_of` gave for each micro-batch (nothing on other stages), and the replay's counts.

    Raises:
        ReplayMismatch: rows do not fit, or were not used exactly once.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if mode == "record" and not forward_only:
        raise ValueError("routing is recorded in a pass without gradients")
    replay = model.replay
    if replay is not None:
        replay.mode = mode
    push = None
    if replay is not None and mode in ("replay", "observe"):
        push = partial(_push, replay, model, backward=not forward_only, allow_missing=allow_missing)
    if not forward_only:
        for wrapped in model.ddp:
            wrapped.zero_grad_buffer()
    chunks = model.ddp
    try:
        reports: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, model, push=push, loss_of=loss_of),
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=max(b.length for b in batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if replay is not None and mode == "record":
            _keep(model, batches, replay.take_recorded(len(batches)))
        stats = replay.finish() if replay is not None and mode != "off" else None
    except BaseException:
        if replay is not None:
            with suppress(ReplayMismatch):
                replay.finish()  # forget what is queued
        raise
    finally:
        if replay is not None:
            replay.mode = "off"
    return reports, stats


def _forward_step(
    rank: ModelOnRank,
    batches: Iterator[MicroBatch],
    model: Any,
    *,
    push: Callable[[MicroBatch], None] | None,
    loss_of: LossOf,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]]:
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(batches)
    # Chunks of one rank see the same micro-batches in the same order, the first chunk first: so it queues for all.
    if push is not None and not getattr(model.module, "vp_stage", None):
        push(batch)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.offsets,
        cu_seqlens_kv=batch.offsets,
        max_seqlen_q=batch.longest,
        max_seqlen_kv=batch.longest,
    )
    options = {} if rank.replay is None else {"padding_mask": _padding_for(model.module, batch)}
    output = model(batch.tokens, batch.positions, None, packed_seq_params=packed, **options)

    def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        value, report = loss_of(logits, batch)
        # Megatron divides by the number of tokens that is returned here, unless it is 0.
        return value, torch.zeros((), dtype=torch.int, device=value.device), report

    return output, loss


def _push(
    replay: ReplayController, model: ModelOnRank, batch: MicroBatch, *, backward: bool, allow_missing: bool
) -> None:
    """Queue this rank's slice of a micro-batch's routing rows."""
    if batch.rows is None or batch.known is None:
        raise ValueError("a micro-batch without routing rows cannot be replayed")
    replay.push(
        batch.rows,
        batch.known,
        batch.routed_owners,
        backward=backward,
        counted=batch.counted,
        allow_missing=allow_missing,
    )


def _keep(model: ModelOnRank, batches: Sequence[MicroBatch], recorded: Sequence[Tensor]) -> None:
    """Make what the routers chose the rows of the micro-batches; padding gets distinct experts, evenly spread."""
    for batch, rows in zip(batches, recorded, strict=True):
        padding = ~batch.counted
        if rows.shape[1]:
            count = int(padding.sum())
            spread = padding_rows(count, rows.shape[1], model.spec.experts_per_token, model.spec.num_experts)
            rows[padding] = spread.to(rows.dtype)
        else:  # a stage of dense layers alone
            rows = rows.new_zeros((len(padding), *rows.shape[1:]))
        batch.rows, batch.known = rows, torch.ones_like(padding)


def _padding_for(chunk: Any, batch: MicroBatch) -> Tensor:
    """bool [1, positions]: the padding, which routers leave out of their statistics.

    Megatron-Core cuts it for sequence parallelism where the embedding is, and nowhere else.
    """
    return batch.padding[None] if chunk.pre_process else batch.padding[None, batch.at.routed]


def set_gradient_reduction(model: ModelOnRank) -> None:
    """Let Megatron-Core sum gradients over ranks after the last micro-batch, without dividing them by anything."""
    from megatron.core.distributed import finalize_model_grads

    def summed(chunks: list[Any], _tokens: Any = None, **options: Any) -> None:
        finalize_model_grads(chunks, None, **options)

    model.chunks[0].config.finalize_model_grads_func = summed
