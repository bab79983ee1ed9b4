"""New weights to all engines: the trainer's ranks gather in step, the first one talks to engines and to the run.

    every rank:    follow ─▶ gather ─▶ report ─▶ follow … ─▶ done | stopped | failed
    first rank:    wait for engines, prepare, pause │ send each bucket │ close, acknowledge, commit, resume

What comes next is decided on the first rank and sent to the others as an `Order`, so that no rank is ever in a
collective that the first one has given up. An engine that fails is left out and the update starts again for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.config.recipe import Engine, Weights
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Member
from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.jsonl import JsonlWriter
from moe_asyncrl.train.membership import Membership, RunControl
from moe_asyncrl.weights.agree import agree
from moe_asyncrl.weights.backend import choose_transport, own_nccl_version
from moe_asyncrl.weights.buckets import plan_buckets, total_bytes
from moe_asyncrl.weights.failure import EnginesFailed
from moe_asyncrl.weights.gather import iter_hf_tensors
from moe_asyncrl.weights.lockstep import Lockstep
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.sender import BucketSender
from moe_asyncrl.weights.update import Updater

PAUSE_MODES = {"in_flight": "in_place"}
"""How engines pause, by the recipe's interrupt policy."""
BLAMELESS_ATTEMPTS = 3
"""Attempts that may fail without any engine being at fault, before the update is given up."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an update came to; the same on every rank."""

    version: int
    seconds: float
    """From the call to the commit and the resumption of all engines, waiting for engines included."""
    pause_seconds: float
    """In which engines did not generate."""
    bytes: int
    """Of weights, as each engine received them once."""
    buckets: int
    engines: tuple[str, ...]
    """That serve the version now."""
    lost: dict[str, str]
    """Reason for each engine that failed during the update."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do next."""

    kind: Literal["wait", "gather", "done", "stopped", "failed"]
    reason: str = ""
    report: PublishReport | None = None


@dataclass
class _Progress:
    """The update under way, on the first rank."""

    version: int
    began: float
    lost: dict[str, str]
    members: tuple[Member, ...] = ()
    blameless: int = 0
    gathered: bool = False


class Publisher:
    """One per trainer rank; all ranks make the same calls. `close` it at the end."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        *,
        weights: Weights,
        engine: Engine,
        connect: Callable[[Member], EngineControl] | None = None,
        control: RunControl | None = None,
        events: JsonlWriter | None = None,
        stop: Callable[[], bool] = lambda: False,
        group: torch.distributed.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        """`connect` (makes the client of one life of an engine), `control` and `events` are for the first rank only.

        `stop` says whether the run is to stop: then no engine is waited for any more.
        `group` has the layout's ranks in its order; the default group if not given. `bucket_bytes` overrides the
        recipe's bucket size.
        """
        self._chunks, self._spec, self._layout, self._rank = chunks, spec, layout, rank
        self._weights = weights
        self._dtype: torch.dtype = getattr(torch, engine.dtype)
        self._max_bytes = bucket_bytes or weights.bucket_mib * 1024 * 1024
        self._buckets = plan_buckets(spec, layout, self._dtype, self._max_bytes)
        self._group = group
        self._lockstep = Lockstep(rank, layout.world_size, group)
        self._events = events
        self._stop = stop
        self._loop: LoopThread | None = None
        if rank == 0:
            if connect is None or control is None:
                raise ValueError("the first rank needs `connect` and `control`")
            self._loop = LoopThread("weights")
            self._updater = Updater(
                host=weights.host, timeout_s=weights.timeout_s, pause_mode=PAUSE_MODES[weights.interrupt]
            )
            self._membership = Membership(control, connect, engine.count, engine.start_timeout_s)
            self._sender = BucketSender(self._loop, self._updater)

    def publish(self, version: int) -> PublishReport | None:
        """Bring this rank's weights as `version` to every engine, commit it, and let the engines go on.

        None if the run was told to stop while no engine was there: nothing was committed then.
        Collective over the trainer's ranks. An optimizer's pending parameter gather must have been finished before.

        Raises:
            UserError: no engine came, all of them failed, or a rank could not gather. The same message on all ranks.
        """
        progress = _Progress(version, time.time(), {})
        problem: str | None = None
        while True:
            caught: BaseException | None = None
            order: Order | None = None
            if self._rank == 0:
                try:
                    order = self._next(progress, problem)
                except Exception as error:
                    caught = error
                    self._call_off()
                    order = Order(kind="failed", reason=f"weights version {version} could not be published: {error}")
            order = self._lockstep.follow(order, Order)
            if order.kind == "done" and order.report is not None:
                return order.report
            if order.kind == "stopped":
                return None
            if order.kind == "failed":
                raise UserError(order.reason) from caught
            if order.kind == "gather":
                problem = self._lockstep.first_problem(self._gather(progress))

    def close(self) -> None:
        """Drop the process group and the clients."""
        if self._loop is None:
            return
        try:
            self._loop.call(self._updater.close())
            self._loop.call(self._membership.close())
        finally:
            self._loop.close()

    # --- first rank -------------------------------------------------------------------------------------------------

    def _next(self, progress: _Progress, problem: str | None) -> Order:
        """One move of the first rank. Raises UserError if the update cannot succeed."""
        if problem:
            raise UserError(problem)
        assert self._loop is not None
        try:
            if progress.gathered:
                progress.gathered = False
                self._sender.drain()
                self._loop.call(self._updater.finish(progress.version))
                return Order(kind="done", report=self._commit(progress))
            members = self._membership.poll()
            if not members:
                return Order(kind="stopped" if self._stop() else "wait")
            progress.members = members
            engines = self._loop.call(self._membership.clients(members))
            transport = choose_transport(
                self._weights.backend, own_nccl_version(), {member.name: member.nccl for member in members}
            )
            self._loop.call(self._updater.start(engines, transport))
        except EnginesFailed as failure:
            self._recover(progress, failure)
            return Order(kind="wait")
        progress.gathered = True
        return Order(kind="gather")

    def _recover(self, progress: _Progress, failure: EnginesFailed) -> None:
        assert self._loop is not None
        self._sender.forget()
        lost = self._loop.call(self._updater.recover(failure))
        if not lost:
            progress.blameless += 1
            if progress.blameless >= BLAMELESS_ATTEMPTS:
                raise UserError(f"{failure} (tried {progress.blameless} times)")
        self._membership.lose(progress.members, lost)
        progress.lost |= lost
        self._note("engine_lost", time.time(), lost=lost or {"": str(failure)})

    def _commit(self, progress: _Progress) -> PublishReport:
        assert self._loop is not None
        self._membership.commit(progress.version, progress.members)
        paused = self._updater.paused_at or time.time()
        late = self._loop.call(self._updater.resume())
        now = time.time()
        if late:
            progress.lost |= late
            self._membership.lose(progress.members, late)
            progress.members = tuple(m for m in progress.members if m.name not in late)
            self._membership.commit(progress.version, progress.members)
        if not progress.members:
            raise UserError("no engine is left: " + str(EnginesFailed(progress.lost)))
        engines = tuple(m.name for m in progress.members)
        self._note("pause", paused, now, version=progress.version)
        self._note(
            "update", progress.began, now, version=progress.version, engines=engines, lost=progress.lost, committed=True
        )
        return PublishReport(
            version=progress.version,
            seconds=now - progress.began,
            pause_seconds=now - paused,
            bytes=total_bytes(self._buckets),
            buckets=len(self._buckets),
            engines=engines,
            lost=progress.lost,
        )

    def _call_off(self) -> None:
        """Free the engines of an update that failed for good. They stay paused: they may hold parts of two versions."""
        assert self._loop is not None
        self._sender.forget()
        try:
            self._loop.call(self._updater.recover(EnginesFailed({})))
        except Exception as error:
            self._note("call_off_failed", time.time(), reason=str(error))

    def _note(self, name: str, start: float, end: float | None = None, **extra: Any) -> None:
        if self._events is not None:
            self._events.append({"role": "trainer-0", "span": name, "start": start, "end": end or start, **extra})

    # --- every rank -------------------------------------------------------------------------------------------------

    def _gather(self, progress: _Progress) -> str:
        """All buckets, once, in step with the other ranks; the first one sends them. Returns what went wrong, or "".

        What went wrong with engines is kept by the sender and does not count here: the first rank deals with it.
        """
        try:
            with agree("preparing the weights", group=self._group):
                parameters = global_parameters(self._chunks, self._spec, self._layout, self._rank)
            with closing(
                iter_hf_tensors(
                    parameters,
                    self._spec,
                    self._layout,
                    self._rank,
                    dtype=self._dtype,
                    group=self._group,
                    max_bytes=self._max_bytes,
                    timeout_s=self._weights.timeout_s,
                )
            ) as gathered:
                for number, (bucket, planned) in enumerate(zip(gathered, self._buckets, strict=True)):
                    if bucket.flat is not None:
                        last = number == len(self._buckets) - 1
                        if not self._sender.put(planned, bucket, progress.version if last else None):
                            break
        except Exception as error:
            return f"rank {self._rank}: {error}"
        return ""
