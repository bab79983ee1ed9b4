"""New weights to all engines: all trainer ranks carry out orders, the first one talks to engines and to the run.

    first rank:   wait for engines ─▶ attempt, attempt, … ─▶ commit, resume, settle        (see `weights.attempt`)
    other ranks:  follow ─▶ carry out ─▶ answer ─▶ follow … ─▶ done | stopped | failed     (see `weights.orders`)

What comes next is decided on the first rank, so that no rank is ever in a step that the first one has given up. An
engine that fails is left out and the update starts again for the others, with all weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.config.recipe import Engine, Weights
from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.data.messages import Member
from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.jsonl import JsonlWriter
from moe_asyncrl.train.joiners import CopyWeights, Joiners
from moe_asyncrl.train.membership import Membership, RunControl
from moe_asyncrl.weights.attempt import Attempt, Held, Sent, Ways
from moe_asyncrl.weights.backend import choose_transport, own_nccl_version
from moe_asyncrl.weights.channels import Channels
from moe_asyncrl.weights.coded import Coder
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.engines_side import EnginesSide
from moe_asyncrl.weights.failure import EnginesFailed
from moe_asyncrl.weights.lockstep import Lockstep
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.orders import Answer, AnyOrder, Done, Failed, Ordered, Resting, Settle, SignAt, Stopped, Wait
from moe_asyncrl.weights.pack import Parameters
from moe_asyncrl.weights.rank_side import RankSide, Settings, Watch
from moe_asyncrl.weights.stop_sign import StopSign
from moe_asyncrl.weights.turns import Turns

PAUSE_MODES = {"in_flight": "in_place", "retract": "retract"}
"""How engines pause, by the recipe's interrupt policy."""
BLAMELESS_ATTEMPTS = 3
"""Attempts that may fail without any engine being at fault, before the update is given up."""
SHARED_MEMORY = "/dev/shm"


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an update came to; the same on every rank."""

    version: int
    seconds: float
    """From the call to the commit and the resumption of all engines, waiting for engines included."""
    pause_seconds: float
    """In which engines did not generate."""
    bytes: int
    """Of all messages, once."""
    buckets: int
    """Messages."""
    engines: tuple[str, ...]
    """That serve the version now."""
    lost: dict[str, str]
    """Reason for each engine that failed during the update."""
    transport: str = ""
    """That the last attempt took."""
    delta: bool = False
    """Only what had changed was sent."""
    changed: float = 1.0
    """Fraction of elements with other bits than before; 1 of a full update."""


@dataclass
class _Progress:
    """The update under way, on the first rank."""

    version: int
    began: float
    lost: dict[str, str] = field(default_factory=dict)
    blameless: int = 0
    paused_at: float | None = None
    """Unix time at which engines began to pause, in the first attempt that came so far."""
    whole: bool = False
    """Changes or slices were refused in this update: all weights go to all, whole."""


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
        epoch: int | None = None,
        folder: Path | None = None,
        layout_of: Callable[[Member], EngineLayout] | None = None,
        watch: Watch = lambda phase, turn: None,
        join_control: RunControl | None = None,
        copy: CopyWeights | None = None,
        coder: Coder | None = None,
    ) -> None:
        """`connect` (makes the client of one life of an engine), `control` and `events` are for the first rank only.

        `stop` says whether the run is to stop: then no engine is waited for any more.
        `group` has the layout's ranks in its order; the default group if not given. `bucket_bytes` overrides the
        recipe's bucket size. `epoch`: the trainer's lease; what the run says now if not given. `folder`: where `disk`
        puts its files. `layout_of`: how an engine lays out the model; as the recipe says if not given. `watch` is told
        each phase as it begins on this rank: survey, prepare, pause, transfer, finish, commit, resume on the first
        one; plan, connect, announce, open, send (with its round), settle on all. `join_control`: a second way to the
        run's state, by which engines that come between updates are served, from each other with `copy`. `coder`: of
        weights that engines hold in another form.
        """
        self._weights = weights
        self._rank = rank
        self._lockstep = Lockstep(rank, layout.world_size, group)
        self._events, self._stop_asked, self._watch = events, stop, watch
        self._sign: StopSign | None = None
        self._loop: LoopThread | None = None
        self._folder = folder
        self._layout_of = layout_of or (lambda member: EngineLayout.of(engine))
        if weights.transport == "disk" and folder is None:
            raise ValueError("weights.transport is disk, and there is no folder for it")

        def parameters() -> Parameters:
            return global_parameters(chunks, spec, layout, rank)

        settings = Settings(
            dtype=getattr(torch, engine.dtype),
            bucket_bytes=bucket_bytes or weights.bucket_mib * 1024 * 1024,
            roots_per_stage=weights.roots_per_stage,
            timeout_s=weights.timeout_s,
            keep_copies=weights.delta == "auto",
            max_fraction=weights.delta_max_fraction,
            threads=torch.get_num_threads(),
            coder=coder,
        )
        self._side = RankSide(spec, layout, rank, parameters, settings, group=group, watch=watch)
        if rank == 0:
            if connect is None or control is None:
                raise ValueError("the first rank needs `connect` and `control`")
            self._epoch = control.state().epoch if epoch is None else epoch
            self._loop = LoopThread("weights")
            self._membership = Membership(control, connect, engine.count, engine.start_timeout_s)
            self._channels = Channels(self._loop, self._command, host=weights.host, timeout_s=weights.timeout_s)
            self._held = Held()
            self._serving: tuple[Member, ...] = ()
            self._joiners: Joiners | None = None
            self._turns = Turns() if engine.colocated else None
            self._resting_since: float | None = None
            # A colocated engine that joined meanwhile would generate in the trainer's turn.
            if join_control is not None and not engine.colocated:
                self._joiners = Joiners(
                    self._loop,
                    join_control,
                    connect,
                    copy,
                    layout_of=self._layout_of,
                    timeout_s=weights.timeout_s,
                    folder=folder if weights.transport == "disk" else None,
                    note=self._note,
                )

    def rest(self) -> None:
        """Colocated: have all engines give their memory back, so that this trainer may train. Until the next `publish`.

        Collective over the trainer's ranks.

        Raises:
            UserError: it is not the trainer's turn, or an engine was not idle in time. The same message on all ranks.
        """
        last: AnyOrder = Resting()
        if self._rank == 0:
            try:
                self._send_to_sleep()
            except Exception as error:
                last = Failed(reason=f"the trainer's turn could not begin: {error}")
        last = self._lockstep.follow(Ordered(last) if self._rank == 0 else None, Ordered).order
        if isinstance(last, Failed):
            raise UserError(last.reason)

    def publish(self, version: int) -> PublishReport | None:
        """Bring this rank's weights as `version` to every engine, commit it, and let the engines go on.

        None if the run was told to stop while no engine was there: nothing was committed then.
        Collective over the trainer's ranks. An optimizer's pending parameter gather must have been finished before.

        Raises:
            UserError: no engine came, all of them failed, or a rank could not send. The same message on all ranks.
        """
        try:
            return self._publish(version)
        except (RuntimeError, torch.distributed.DistError) as error:
            raise DeadlineExceeded(
                f"weights version {version}: a trainer rank is gone or did not come in time; see the logs of all ranks "
                f"({error})"
            ) from error

    def _publish(self, version: int) -> PublishReport | None:
        self._meet()
        if self._rank != 0:
            return self._follow()
        caught: BaseException | None = None
        if self._joiners is not None:
            self._held.manifests |= self._joiners.rest()
        try:
            report = self._lead(_Progress(version, time.time()))
            last: Done | Stopped | Failed = Stopped() if report is None else Done(report=msgspec.to_builtins(report))
        except Exception as error:
            caught, last = error, Failed(reason=f"weights version {version} could not be published: {error}")
        if self._joiners is not None:
            self._joiners.go_on(self._held.version, self._serving, self._held.manifests)
        try:
            self._lockstep.follow(Ordered(last), Ordered)
        except Exception:
            # Another rank is gone. What went wrong first is what to report.
            if not isinstance(last, Failed):
                raise
        if isinstance(last, Failed):
            raise UserError(last.reason) from caught
        return report

    def close(self) -> None:
        """Drop the process groups and the clients."""
        self._side.close()
        if self._loop is None:
            return
        try:
            if self._joiners is not None:
                self._joiners.close()
            self._channels.close()
            self._loop.call(self._membership.close())
        finally:
            self._loop.close()
            if self._sign is not None:
                self._sign.close()

    # --- every rank -------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Once: the sign that the first rank can put up."""
        if self._sign is None:
            own = StopSign(self._weights.host, None) if self._rank == 0 else None
            at = self._lockstep.follow(None if own is None else SignAt(port=own.port), SignAt)
            self._sign = own or StopSign(self._weights.host, at.port)
            self._side.stop = self._sign

    def _follow(self) -> PublishReport | None:
        while True:
            order = self._lockstep.follow(None, Ordered).order
            match order:
                case Done():
                    return msgspec.convert(order.report, PublishReport)
                case Stopped():
                    return None
                case Failed():
                    raise UserError(order.reason)
            self._carry_out(order)

    def _carry_out(self, order: AnyOrder) -> list[Answer]:
        answers = self._lockstep.gather(self._side.do(order), Answer)
        self._side.agreed(order, answers)
        return answers

    # --- first rank -------------------------------------------------------------------------------------------------

    def _command(self, order: AnyOrder) -> list[Answer]:
        """Have all ranks carry out an order. Raises UserError for a problem of one of them."""
        self._lockstep.follow(Ordered(order), Ordered)
        answers = self._carry_out(order)
        problem = next((answer.problem for answer in answers if answer.problem), "")
        if problem:
            raise UserError(problem)
        return answers

    def _send_to_sleep(self) -> None:
        assert self._loop is not None
        if self._turns is None:
            raise UserError("engines are not colocated")
        self._turns.go("rest")
        self._resting_since = time.time()
        engines = self._loop.call(self._membership.clients(self._serving))
        side = EnginesSide(engines, update="", timeout_s=self._weights.timeout_s)
        lost = self._loop.call(side.sleep(self._epoch))
        # Whoever is gone is left out at the next update, when it does not answer.
        self._note("rest", self._resting_since, time.time(), engines=[e.name for e in engines], lost=lost)

    def _lead(self, progress: _Progress) -> PublishReport | None:
        assert self._loop is not None
        while True:
            members = self._members()
            if members is None:
                return None
            attempt = self._attempt(progress, members)
            if self._turns is not None:
                self._turns.go("weights")
            try:
                changes = self._weights.delta == "auto" and not progress.whole
                sent = attempt.run(self._held, changes=changes, slices=not progress.whole)
                return self._commit(progress, members, attempt, sent)
            except EnginesFailed as failure:
                self._recover(progress, members, attempt, failure)
            except Exception:
                self._call_off(attempt)
                raise

    def _members(self) -> tuple[Member, ...] | None:
        """The engines to update; None if the run is to stop and none is there."""
        while not (members := self._membership.poll()):
            if self._stop_asked():
                return None
            self._command(Wait())
        return members

    def _attempt(self, progress: _Progress, members: Sequence[Member]) -> Attempt:
        assert self._loop is not None
        w = self._weights
        backend = choose_transport(w.backend, own_nccl_version(), {member.name: member.nccl for member in members})
        ways = Ways(
            transport=w.transport,
            backend=backend,
            depth=w.depth,
            timeout_s=w.timeout_s,
            pause_mode=PAUSE_MODES[w.interrupt],
            max_fraction=w.delta_max_fraction,
            folder=str(self._folder) if w.transport == "disk" else SHARED_MEMORY,
        )
        return Attempt(
            self._loop.call(self._membership.clients(members)),
            [self._layout_of(member) for member in members],
            ways,
            loop=self._loop,
            command=self._command,
            side=self._side,
            stop=self._sign,
            channels=self._channels,
            epoch=self._epoch,
            version=progress.version,
            watch=lambda phase: self._watch(phase, 0),
        )

    def _recover(
        self, progress: _Progress, members: Sequence[Member], attempt: Attempt, failure: EnginesFailed
    ) -> None:
        self._held = Held()
        progress.paused_at = progress.paused_at or attempt.paused_at
        lost = attempt.recover(failure)
        self._command(Settle(version=None))
        narrow = attempt.delta or attempt.transport == "direct"
        if narrow and not progress.whole and attempt.paused_at is None and lost == failure.lost:
            # They live, and have refused changes or slices: whole weights they may take.
            lost = {}
        if len(lost) == len(members) and not attempt.engines.gone:
            # All of them live and complain: it is what came to them, as a bit that flipped before a broadcast.
            lost = {}
        progress.whole = True
        if not lost:
            progress.blameless += 1
            if progress.blameless >= BLAMELESS_ATTEMPTS:
                raise UserError(f"{failure} (tried {progress.blameless} times)")
        self._membership.lose(members, lost)
        progress.lost |= lost
        self._note("engine_lost", time.time(), lost=lost or {"": str(failure)})

    def _commit(self, progress: _Progress, members: Sequence[Member], attempt: Attempt, sent: Sent) -> PublishReport:
        assert self._loop is not None
        progress.lost |= sent.lost
        paused_at = progress.paused_at or sent.paused_at
        self._membership.lose(members, sent.lost)
        members = tuple(m for m in members if m.name in sent.manifests)
        self._membership.commit(progress.version, members)
        self._watch("resume", 0)
        if self._turns is not None:
            self._turns.go("cache")
            self._turns.go("go_on")
            paused_at, self._resting_since = self._resting_since or paused_at, None
        engines = [e for e in attempt.engines.engines if e.name in sent.manifests]
        late = self._loop.call(attempt.engines.resume(engines))
        now = time.time()
        if late:
            progress.lost |= late
            self._membership.lose(members, late)
            members = tuple(m for m in members if m.name not in late)
            self._membership.commit(progress.version, members)
        if not members:
            raise UserError("no engine is left: " + str(EnginesFailed(progress.lost)))
        self._command(Settle(version=progress.version))
        attempt.keep_folder(sent)
        self._serving = members
        self._held = Held(version=progress.version, manifests={m.name: sent.manifests[m.name] for m in members})
        names = tuple(m.name for m in members)
        self._note("pause", paused_at, now, version=progress.version)
        report = PublishReport(
            version=progress.version,
            seconds=now - progress.began,
            pause_seconds=now - paused_at,
            bytes=sent.bytes,
            buckets=sent.messages,
            engines=names,
            lost=progress.lost,
            transport=sent.transport,
            delta=sent.delta,
            changed=sent.changed,
        )
        fields = {name: getattr(report, name) for name in ("version", "engines", "lost", "transport", "delta", "bytes")}
        self._note("update", progress.began, now, committed=True, changed=sent.changed, **fields)
        return report

    def _call_off(self, attempt: Attempt) -> None:
        """Free the engines of an update that failed for good. Those that have parts of two versions stay paused."""
        self._held = Held()
        try:
            attempt.recover(EnginesFailed({}, "the trainer gave the update up"), resume=True)
        except Exception as error:
            self._note("call_off_failed", time.time(), reason=str(error))

    def _note(self, name: str, start: float, end: float | None = None, **extra: Any) -> None:
        if self._events is not None:
            self._events.append({"role": "trainer-0", "span": name, "start": start, "end": end or start, **extra})
