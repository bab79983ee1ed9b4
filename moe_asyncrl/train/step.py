"""One optimizer update: passes over micro-batches, one small collective for the figures, AdamW."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.replay.controller import Mode, ReplayStats
from moe_asyncrl.replay.rows import Coverage
from moe_asyncrl.train.batch import MicroBatch
from moe_asyncrl.train.logprobs import token_entropy, token_logprobs
from moe_asyncrl.train.metrics import StepMetrics, Totals, step_metrics
from moe_asyncrl.train.objective import Objective
from moe_asyncrl.train.optimizer import set_rates
from moe_asyncrl.train.passes import ModelOnRank, run_passes


class TrainingDiverged(UserError):
    """The loss or the gradient is not finite."""


def gradients(
    model: ModelOnRank,
    batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    mode: Mode = "off",
    allow_missing: bool = False,
    counted: Coverage | None = None,
) -> Totals:
    """Gradients of the batch's loss, left in the DDP buffers; the figures, summed over all ranks.

    `counted`: routing rows of this rank's trajectories, given where `model.counts_trajectories`.

    Raises:
        TrainingDiverged: the loss is not finite.
        ReplayMismatch: routing rows do not fit.
    """
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_group()

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        entropy = token_entropy(logits, temperature=objective.temperature, group=tp)[0] if objective.policy else None
        logprobs = token_logprobs(
            logits, batch.labels, temperature=objective.temperature, support=batch.support, wanted=batch.trained
        )[0]
        loss, terms = objective(logprobs, batch)
        return loss, {"terms": terms, "entropy": None if entropy is None else (entropy * batch.trained).sum()}

    reports, stats = run_passes(model, batches, loss_of, forward_only=False, mode=mode, allow_missing=allow_missing)
    mine = _totals(model, batches, reports, stats)
    if counted is not None and model.counts_trajectories:
        mine.add(
            {
                "rows": float(counted.rows),
                "known_rows": float(counted.known),
                "same_version_rows": float(counted.same_version),
            }
        )
    totals = mine.reduced(model.device)
    if not math.isfinite(totals.sums["loss"]):
        raise TrainingDiverged(
            f"the loss is {totals.sums['loss']}: lower optimizer.lr or algorithm.importance_cap, and look at rewards"
        )
    return totals


def update(
    model: ModelOnRank,
    optimizer: Any,
    batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    lr: float,
    weight_decay: float = 0.0,
    mode: Mode = "off",
    allow_missing: bool = False,
    counted: Coverage | None = None,
) -> StepMetrics:
    """One optimizer update from the micro-batches of this rank. Every rank gets the same metrics.

    Without a single trained token in the whole batch, the weights and Adam's moments stay as they are.

    Raises:
        TrainingDiverged: the loss or the gradient norm is not finite. The model must not be used any more.
        ReplayMismatch: routing rows do not fit.
    """
    start = time.perf_counter()
    totals = gradients(model, batches, objective, mode=mode, allow_missing=allow_missing, counted=counted)
    norm = 0.0
    if totals.sums["tokens"] > 0:
        set_rates(optimizer, lr=lr, weight_decay=weight_decay)
        _, found, _ = optimizer.step()
        norm = float(found)
        if not math.isfinite(norm):
            raise TrainingDiverged(f"the gradient norm is {norm}: lower optimizer.lr, and look at the rewards")
    return step_metrics(
        totals,
        grad_norm=norm,
        lr=lr,
        micro_batches=len(batches),
        seconds=time.perf_counter() - start,
        policy=objective.policy,
    )


def _totals(
    model: ModelOnRank, batches: Sequence[MicroBatch], reports: Sequence[dict[str, Any]], stats: ReplayStats | None
) -> Totals:
    totals = Totals()
    if model.counts:
        for batch, report in zip(batches, reports, strict=True):
            report["terms"].into(totals)
            counts = {"positions": batch.length, "real_positions": batch.real}
            if model.counts_trajectories:
                counts["sequences"] = batch.samples
            totals.add({name: float(value) for name, value in counts.items()})
            if report["entropy"] is not None:
                totals.add({"entropy": float(report["entropy"])})
        totals.add({"entropy_tokens": totals.sums["tokens"]} if reports and reports[0]["entropy"] is not None else {})
    if stats is not None:
        counts = {"decisions": stats.decisions, "flipped": stats.flipped, "missing": stats.missing}
        totals.add({name: float(value) for name, value in counts.items()})
    return totals
