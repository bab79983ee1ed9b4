"""The trainer's loops: supervised steps, and reinforcement-learning steps from the buffer's batches.

    every rank:   follow the first rank's order ─▶ fetch its share ─▶ step ─▶ publish ─▶ (checkpoint, probe) ─▶ follow …
    first rank:   also takes batches, says what was consumed, writes metrics

A checkpoint is begun after a step and written while training goes on; whether it is on the disk is asked whenever it is
asked whether to stop.

Whether to stop is asked of all ranks at the boundary of a step, so that a signal to any of them ends all of them there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import torch
import torch.distributed as dist

from moe_asyncrl.algorithms.schedule import learning_rate
from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import ConsumedResult, Counters, Cursor, HeldGroup
from moe_asyncrl.telemetry.expert_load import collapsing, load_fields
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.telemetry.spans import span
from moe_asyncrl.train.build import TrainState
from moe_asyncrl.train.by_source import reward_by_source
from moe_asyncrl.train.metrics import StepMetrics
from moe_asyncrl.train.objective import SupervisedObjective
from moe_asyncrl.train.optimizer import forget_moments
from moe_asyncrl.train.plan import BatchPlan
from moe_asyncrl.train.policy import policy_step
from moe_asyncrl.train.probe import Measured
from moe_asyncrl.train.publish import PublishReport
from moe_asyncrl.train.reference import Reference
from moe_asyncrl.train.routing import routing_record
from moe_asyncrl.train.sft import Examples, micro_batches_of
from moe_asyncrl.train.step import update
from moe_asyncrl.weights.agree import agree, collective_device
from moe_asyncrl.weights.lockstep import Lockstep

log = logging.getLogger(__name__)

TURN_S = 2.0
"""Longest time that the other ranks are left waiting in one collective while the first one waits for a batch."""

Ended = Literal["done", "stopped"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do next. `failed` carries the reason."""

    kind: Literal["wait", "train", "failed"]
    reason: str = ""
    groups: tuple[HeldGroup, ...] = ()


class Publish(Protocol):
    """Brings this trainer's weights to the engines as a version; collective."""

    def __call__(self, version: int, /) -> PublishReport | None:
        """None if the run was told to stop first. Raises `UserError` if no engine has them."""
        ...


class Measure(Protocol):
    """Measures the trainer-sampler KL right after the trainer's weights were published as `version`; collective."""

    def __call__(self, version: int, /) -> Measured | None:
        """What was found; None where nothing could be measured."""
        ...


class Saver(Protocol):
    """Writes checkpoints; all calls are collective. Each raises `UserError` if one could not be written."""

    def save(self, step: int, cursor: Cursor, counters: Counters, /) -> None:
        """Begin the checkpoint of a step, which holds the weights of this moment."""
        ...

    def poll(self) -> None:
        """Complete what was begun if it is written by now."""
        ...

    def finish(self) -> None:
        """Wait for what was begun, and complete it."""
        ...


@dataclass
class TrainRun:
    """What the loops work with on one rank."""

    recipe: Recipe
    folder: RunFolder
    state: TrainState
    client: BufferClient
    lockstep: Lockstep
    stop_asked: Callable[[], bool]
    """Whether this process got a signal to stop."""
    saver: Saver
    publish: Publish | None = None
    """None where there are no engines (supervised runs)."""
    rest: Callable[[], None] | None = None
    """Colocated: sends the engines to sleep before a step; collective. Raises `UserError`."""
    measure: Measure | None = None
    reference: Reference | None = None
    """What the KL is measured against; None where the recipe wants none."""
    cursor: Cursor = field(default_factory=Cursor)
    counters: Counters = field(default_factory=Counters)
    saved: int | None = None
    """Step of the newest checkpoint, complete or begun: never written again, as that would be without it meanwhile."""

    @property
    def rank(self) -> int:
        """Global trainer rank."""
        return self.state.model.rank

    @property
    def first(self) -> bool:
        """True on the rank that talks to the rest of the run."""
        return self.rank == 0

    def record(self, kind: str, **fields: Any) -> None:
        """Write a line of metrics, on the first rank."""
        if self.first:
            self.folder.metrics.append({"kind": kind, "time": time.time(), **fields})

    def should_stop(self) -> bool:
        """Look after the checkpoint under way; then, whether any rank was asked to stop. Collective."""
        self.saver.poll()
        flag = torch.tensor([float(self.stop_asked())], device=collective_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


# --- supervised ------------------------------------------------------------------------------------------------------


def warm_up(run: TrainRun, examples: Examples) -> Ended:
    """Supervised steps before reinforcement learning; Adam starts anew afterwards, as another objective begins."""
    w = run.recipe.warmup
    for step in range(w.steps):
        if run.should_stop():
            return "stopped"
        # A tenth of the steps up to the peak, then down to a tenth of it: the policy is to be handed on at rest.
        lr = learning_rate(
            step,
            peak=w.lr,
            schedule="cosine",
            warmup_steps=max(1, w.steps // 10),
            total_steps=w.steps,
            min_ratio=0.1,
        )
        done = supervised_step(run, examples, step, size=w.batch_size, lr=lr, name="warmup_step")
        run.record("warmup", step=step + 1, of=w.steps, **_step_fields(done))
    forget_moments(run.state.optimizer)
    return "done"


def supervised_loop(run: TrainRun, examples: Examples, *, start: int) -> Ended:
    """Steps `start` to the last one of the recipe, with supervised learning as the objective of the run."""
    r = run.recipe
    for step in range(start, r.run.steps):
        if run.should_stop():
            return _stopped(run, step)
        done = supervised_step(run, examples, step, size=r.warmup.batch_size, lr=rate(r, step), name="step")
        run.record("step", step=step + 1, version=step + 1, reward=None, **_step_fields(done))
        _maybe_save(run, step + 1)
    run.saver.finish()
    return "done"


def supervised_step(run: TrainRun, examples: Examples, step: int, *, size: int, lr: float, name: str) -> StepMetrics:
    """One supervised update on the examples of step `step`."""
    t = run.recipe.trainer
    model = run.state.model
    with span(run.folder.events, f"trainer-{run.rank}", name, step=step + 1):
        with agree(f"reading the examples of step {step + 1}"):
            samples = examples.batch(step, size, run.recipe.algorithm.aggregation)
            batches = micro_batches_of(model, samples, micro_batch_tokens=t.micro_batch_tokens)
        return update(
            model,
            run.state.optimizer,
            batches,
            SupervisedObjective(),
            lr=lr,
            weight_decay=run.recipe.optimizer.weight_decay,
        )


# --- reinforcement learning -----------------------------------------------------------------------------------------


def reinforce(run: TrainRun, *, start: int) -> Ended:
    """Steps `start` to the last one of the recipe. The engines must already serve the weights of `start`."""
    r = run.recipe
    for step in range(start, r.run.steps):
        began = time.perf_counter()
        groups = next_batch(run, step)
        if groups is None:
            return _stopped(run, step)
        waited = time.perf_counter() - began
        if run.rest is not None:
            run.rest()
        with span(run.folder.events, f"trainer-{run.rank}", "step", step=step + 1):
            plan, done = policy_step(
                r, run.state, run.client, groups, step=step + 1, lr=rate(r, step), reference=run.reference
            )
        if run.first:
            result: ConsumedResult = run.client.consumed(step + 1)
            run.cursor, run.counters = result.cursor, result.counters
        fields = _policy_fields(step, plan, done)
        due = (step + 1) % r.weights.every == 0 or step + 1 == r.run.steps
        report = run.publish(step + 1) if due and run.publish is not None else None
        if report is not None:
            fields |= {
                "publish_seconds": report.seconds,
                "pause_seconds": report.pause_seconds,
                "publish_bytes": report.bytes,
                "engines": len(report.engines),
            }
        # After the update, as its time is part of the step's pace.
        seconds = time.perf_counter() - began
        if run.first:
            state = run.client.state()
            fields |= {"buffer_held": state.held, "buffer_capacity": state.capacity}
        run.record(
            "step",
            step=step + 1,
            version=step + 1,
            **fields,
            wait_seconds=waited,
            turn_seconds=seconds,
            trained_tokens_per_s=done.tokens / max(seconds, 1e-9),
        )
        _maybe_save(run, step + 1)
        if report is not None and run.measure is not None and _probe_due(r, step + 1):
            with span(run.folder.events, f"trainer-{run.rank}", "probe", step=step + 1):
                found = run.measure(step + 1)
            if found is not None:
                record_probe(run, step + 1, found)
    run.saver.finish()
    return "done"


def record_probe(run: TrainRun, step: int, found: Measured) -> None:
    """Write what a probe after `step` found: figures to the metrics, routing to a file of its own."""
    r = found.routing
    load = {} if r is None else load_fields(r.load_sampler, r.load_trainer)
    kl = {"kl_replay": found.kl_replay, "kl_live": found.kl_live, "tokens": found.tokens}
    run.record("probe", step=step, version=step, **kl, **load)
    if not run.first or r is None:
        return
    run.folder.routing.append(routing_record(step, step, r))
    now = time.time()
    run.folder.events.append({"role": "trainer-0", "span": "experts", "start": now, "end": now, "step": step, **load})
    for side, counts in (("sampler", r.load_sampler), ("trainer", r.load_trainer)):
        if layers := collapsing(r.layers, counts):
            log.warning("step %d: most experts of layers %s get no token by the %s's routing", step, layers, side)


def next_batch(run: TrainRun, step: int) -> tuple[HeldGroup, ...] | None:
    """The groups of step `step + 1`, on every rank; None if the run was asked to stop.

    Raises:
        DeadlineExceeded: no batch within `buffer.wait_s`; the same on every rank.
        UserError: the run failed elsewhere, or the buffer is gone.
    """
    since = time.monotonic()
    while True:
        if run.should_stop():
            return None
        caught: Exception | None = None
        order: Order | None = None
        if run.first:
            try:
                order = _poll(run, step, since)
            except Exception as error:
                caught, order = error, Order(kind="failed", reason=str(error))
        order = run.lockstep.follow(order, Order)
        if order.kind == "train":
            return order.groups
        if order.kind == "failed":
            raise caught if caught is not None else UserError(order.reason)


def _poll(run: TrainRun, step: int, since: float) -> Order:
    """Ask for the batch for one turn; the first rank's part of `next_batch`."""
    r = run.recipe
    batch = run.client.take(
        step + 1,
        step,
        r.rollout.groups_per_step,
        deadline_s=r.buffer.wait_s,
        since=since,
        turn_s=TURN_S,
        stop=run.stop_asked,
    )
    return Order(kind="wait") if batch is None else Order(kind="train", groups=batch.groups)


# --- both -------------------------------------------------------------------------------------------------------------


def rate(recipe: Recipe, step: int) -> float:
    """Learning rate of the step that follows `step` done ones."""
    o = recipe.optimizer
    return learning_rate(
        step,
        peak=o.lr,
        schedule=o.schedule,
        warmup_steps=o.warmup_steps,
        total_steps=recipe.run.steps,
        min_ratio=o.min_lr_ratio,
    )


def _stopped(run: TrainRun, step: int) -> Ended:
    """Leave a checkpoint of the steps done."""
    save_once(run, step)
    run.saver.finish()
    return "stopped"


def save_once(run: TrainRun, step: int) -> None:
    """Begin the checkpoint of `step` unless it is there."""
    if run.saved != step:
        run.saver.save(step, run.cursor, run.counters)
        run.saved = step


def _maybe_save(run: TrainRun, step: int) -> None:
    every = run.recipe.checkpoint.every
    if step == run.recipe.run.steps or (every > 0 and step % every == 0):
        save_once(run, step)


def _probe_due(recipe: Recipe, step: int) -> bool:
    every = recipe.replay.probe_every
    return every > 0 and (step % every == 0 or step == recipe.run.steps)


def _step_fields(done: StepMetrics) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.structs.asdict(done).items() if value is not None}
    fields["step_seconds"] = fields.pop("seconds")
    fields["trained_tokens_per_s"] = done.tokens / max(done.seconds, 1e-9)
    return fields


def _policy_fields(step: int, plan: BatchPlan, done: StepMetrics) -> dict[str, Any]:
    headers = [h for update in plan.updates for h in update.headers]
    staleness = [step - h.oldest_version for h in headers]
    fields = _step_fields(done)
    if by_source := reward_by_source(headers):
        fields["reward_by_source"] = by_source
    del fields["trained_tokens_per_s"]
    fields["replay_rows"] = fields.pop("rows")
    fields["flip_rate"] = fields.pop("flip_fraction", None)
    return {
        **fields,
        "reward": plan.reward_mean,
        "reward_std": plan.reward_std,
        "uniform_groups": plan.uniform_groups,
        "unscored": plan.unscored,
        "dropped_other_version": plan.dropped,
        "staleness_mean": sum(staleness) / len(staleness) if staleness else None,
        "staleness_max": max(staleness, default=None),
        "staleness_histogram": [staleness.count(lag) for lag in range(max(staleness, default=-1) + 1)],
    }
