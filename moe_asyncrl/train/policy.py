"""One batch of reinforcement learning: from held groups to updated weights.

    plan ─▶ fetch ─▶ micro-batches ─▶ passes without gradients ─▶ updates
                                      old policy: for several updates, for a KL in the reward, or for `r2`
                                      reference:  if the run has one, its weights in the policy's place

All passes replay the same rows: those of the sampler (`r3`), or those that the old policy's pass has recorded (`r2`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.messages import HeldGroup
from moe_asyncrl.replay.controller import Mode
from moe_asyncrl.replay.rows import Coverage
from moe_asyncrl.train.batch import MicroBatch
from moe_asyncrl.train.build import TrainState
from moe_asyncrl.train.fetch import coverage_of, fetch_rows, fields_for, micro_batches_from
from moe_asyncrl.train.kl_penalty import set_advantages, trajectory_kl
from moe_asyncrl.train.metrics import StepMetrics, combined
from moe_asyncrl.train.objective import PolicyObjective
from moe_asyncrl.train.plan import BatchPlan, advantages_of, crossover_length, plan_batch
from moe_asyncrl.train.reference import Reference
from moe_asyncrl.train.score import logprobs_of_batches
from moe_asyncrl.train.step import update
from moe_asyncrl.weights.agree import agree


def policy_step(
    recipe: Recipe,
    state: TrainState,
    client: BufferClient,
    groups: tuple[HeldGroup, ...],
    *,
    step: int,
    lr: float,
    reference: Reference | None = None,
) -> tuple[BatchPlan, StepMetrics]:
    """All updates of the batch that was taken for `step`. Collective.

    Raises:
        ReplayMismatch, ContractViolation: a trajectory does not fit; nothing was trained.
        TrainingDiverged: loss or gradient is not finite.
    """
    r, a, model = recipe, recipe.algorithm, state.model
    mode = routing_mode(r.replay.mode) if model.spec.is_moe else "off"
    replay = mode == "replay"
    allow_missing = r.replay.allow_missing
    with agree(f"preparing the batch of step {step}"):
        plan = plan_batch(
            groups,
            a,
            model.layout,
            micro_batch_tokens=r.trainer.micro_batch_tokens,
            crossover=crossover_length(model.spec),
            other_version=r.replay.other_version if replay else "use",
        )
        prepared = []
        for part in plan.updates:
            headers = [part.headers[i] for i in part.of_rank(model.layout.coordinates(model.rank).dp)]
            arrays = client.fetch(step, headers, fields_for(model))
            batches = micro_batches_from(
                part,
                arrays,
                model,
                rows=fetch_rows(client, step, part, groups, arrays, model) if replay else None,
                allow_missing=allow_missing,
                temperature=r.rollout.temperature,
                mask_other=replay and r.replay.other_version == "mask",
            )
            counted = model.counts_trajectories and model.spec.is_moe
            rows = coverage_of(headers, arrays) if counted else Coverage(0, 0, 0)
            prepared.append((batches, rows))
    everything = [batch for batches, _ in prepared for batch in batches]
    add_passes(recipe, state, groups, plan, everything, mode=mode, reference=reference)
    objective = PolicyObjective(
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        importance_cap=a.importance_cap,
        temperature=r.rollout.temperature,
        kl_coef=a.kl_coef if a.kl_in == "loss" else 0.0,
        kl_estimator=a.kl_estimator,
    )
    done = [
        update(
            model,
            state.optimizer,
            batches,
            objective,
            lr=lr,
            weight_decay=r.optimizer.weight_decay,
            mode=after_first(mode),
            allow_missing=allow_missing,
            counted=rows,
        )
        for batches, rows in prepared
    ]
    return plan, combined(done)


def routing_mode(replay: Literal["off", "r2", "r3"]) -> Mode:
    """What routers do in the first pass over a batch's micro-batches."""
    modes: dict[str, Mode] = {"off": "off", "r2": "record", "r3": "replay"}
    return modes[replay]


def after_first(mode: Mode) -> Mode:
    """What they do in the passes behind it: what was recorded is replayed."""
    return "replay" if mode == "record" else mode


def add_passes(
    recipe: Recipe,
    state: TrainState,
    groups: Sequence[HeldGroup],
    plan: BatchPlan,
    batches: Sequence[MicroBatch],
    *,
    mode: Mode,
    reference: Reference | None,
) -> None:
    """Put into the micro-batches what takes a pass of its own: log-probabilities of the old policy and of the
    reference, and advantages of rewards less the KL. In mode `record`, also the routing of the old policy's pass.
    Collective."""
    a, model = recipe.algorithm, state.model

    def logprobs(mode: Mode) -> list[Tensor | None]:
        found, _ = logprobs_of_batches(
            model,
            batches,
            temperature=recipe.rollout.temperature,
            mode=mode,
            allow_missing=recipe.replay.allow_missing,
        )
        return list(found) if found is not None else [None] * len(batches)

    several = len(plan.updates) > 1
    in_reward = reference is not None and a.kl_coef > 0 and a.kl_in == "reward"
    old = logprobs(mode) if several or in_reward or mode == "record" else [None] * len(batches)
    if several:
        for batch, values in zip(batches, old, strict=True):
            batch.old_logprobs = values
    if reference is not None:
        with reference.in_place():
            frozen = logprobs(after_first(mode))
        for batch, values in zip(batches, frozen, strict=True):
            batch.reference_logprobs = values
    if in_reward:
        names = [h.identity.trajectory for part in plan.updates for h in part.headers]
        divergence = trajectory_kl(model, batches, old, names, estimator=a.kl_estimator)
        penalties = {name: a.kl_coef * kl for name, kl in divergence.items()}
        set_advantages(batches, advantages_of(groups, a, penalties))
