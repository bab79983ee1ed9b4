"""What the buffer's process answers, without its sockets: a request with frames and the time in, a reply out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from moe_asyncrl.buffer.cut_rows import DIGESTS, RowDigests, cut_digests, cut_frame
from moe_asyncrl.buffer.ledger import Ledger, Limits, Slot
from moe_asyncrl.control import state as control
from moe_asyncrl.control.state import ControlState, Rejected
from moe_asyncrl.data.group_wire import arrays_of_group
from moe_asyncrl.data.messages import (
    AcquireLease,
    AnyReply,
    AnyRequest,
    AskTickets,
    Batch,
    Begin,
    Commit,
    Consumed,
    ConsumedResult,
    Done,
    Fetch,
    FetchRows,
    Frames,
    GetState,
    HeldGroup,
    Join,
    Lease,
    Leave,
    MemberId,
    NotReady,
    PutGroup,
    PutResult,
    Refused,
    ReturnTicket,
    RunState,
    SetPhase,
    Take,
    Ticket,
    Tickets,
)
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import ROUTING, Frame, TrajectoryHeader, check_binding

log = logging.getLogger(__name__)

_Answer = tuple[AnyReply, Sequence[Frame]]
MAY_NOT_KNOW_THE_EPOCH = (GetState, AcquireLease, Join, Leave, AskTickets)
"""Requests that a process makes before it knows who owns the run."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of the buffer, in seconds."""

    sampler_silent_s: float = 120.0
    """A sampler from which nothing came for this long is gone: its credits are issued to others. Any request is a sign
    of life, and a sampler asks for the state or for credits every few seconds, however long one group takes."""
    engine_silent_s: float = 30.0
    """An engine that did not join again for this long is gone."""
    retry_s: float = 0.1
    """When to ask again for credits."""


@dataclasses.dataclass(frozen=True)
class Held:
    """One group in memory."""

    ticket: Ticket
    headers: tuple[TrajectoryHeader, ...]
    frames: dict[tuple[str, str], Frame]
    """By trajectory and field."""
    digests: dict[str, RowDigests] = dataclasses.field(default_factory=dict)
    """By trajectory, where rows are."""

    def header(self, trajectory: str) -> TrajectoryHeader:
        """The header of one of its trajectories."""
        return next(h for h in self.headers if h.identity.trajectory == trajectory)


class BufferService:
    """The state of the run, the account and the groups, and what may be asked of them."""

    def __init__(
        self,
        limits: Limits,
        *,
        timing: Timing | None = None,
        state: ControlState | None = None,
        save: Callable[[ControlState], None] = lambda state: None,
        trained: Callable[[int, int, Sequence[Held]], None] = lambda step, version, groups: None,
    ) -> None:
        """`save` is called with every new state before anybody is told of it.

        `trained` hears of each batch that was consumed: its step, the version that the step began with, its groups.
        """
        self.limits = limits
        self.timing = timing or Timing()
        self.state = state or ControlState()
        self.ledger = Ledger(limits)
        self._save = save
        self._trained = trained
        self._taken_version = 0
        self._groups: dict[int, Held] = {}
        self._begun_with: Begin | None = None
        save(self.state)

    def handle(self, request: AnyRequest, frames: Sequence[Frame], now: float) -> _Answer:
        """Answer one request that arrived at `now` (Unix seconds). Bad ones are refused; nothing is raised for them."""
        try:
            if frames and not isinstance(request, PutGroup):
                raise Rejected("bad_request", f"{type(request).__name__} takes no frames, {len(frames)} came")
            unknown = isinstance(request, MAY_NOT_KNOW_THE_EPOCH) or (
                isinstance(request, SetPhase) and request.phase == "failed" and self.state.epoch == 0
            )
            control.check_epoch(self.state, request.epoch, may_be_unknown=unknown)
            self.ledger.seen(request.sender, now)
            return self._answer(request, frames, now)
        except Rejected as no:
            log.info("%s of %s refused: %s", type(request).__name__, request.sender, no)
            return Refused(request=request.request, code=no.code, reason=no.reason), ()
        except ContractViolation as bad:
            log.warning("%s of %s refused: %s", type(request).__name__, request.sender, bad)
            return Refused(request=request.request, code="bad_request", reason=str(bad)), ()

    def tick(self, now: float) -> None:
        """Let go of samplers and engines that fell silent. Call it about once a second."""
        state, gone = control.expire(self.state, now, self.timing.engine_silent_s)
        for life in gone:
            log.warning("%s (incarnation %d) is silent and left out", life.name, life.incarnation)
        self._set(state)
        for index, attempt in self.ledger.expire(now, self.timing.sampler_silent_s):
            log.warning("prompt instance %d (attempt %d): its sampler is silent", index, attempt)

    def run_state(self, request: int = 0) -> RunState:
        """The state that everybody may read."""
        s = self.state
        return RunState(
            request=request,
            phase=s.phase,
            error=s.error,
            epoch=s.epoch,
            version=s.version,
            step=s.step,
            members=s.members,
            held=len(self.ledger.held),
            capacity=self.limits.capacity,
            issued=len(self.ledger.issued),
            counters=self.ledger.counters,
        )

    @property
    def bytes_held(self) -> int:
        """Bytes of all frames in memory."""
        return sum(len(f) for g in self._groups.values() for f in g.frames.values())

    # --- by kind -------------------------------------------------------------------------------------------------

    def _answer(self, r: AnyRequest, frames: Sequence[Frame], now: float) -> _Answer:
        match r:
            case GetState():
                return self.run_state(r.request), ()
            case AcquireLease():
                self._acquire(r)
                return Lease(request=r.request, lease=self.state.epoch), ()
            case Begin():
                self._begin(r)
                return Done(request=r.request), ()
            case Commit():
                self._set(control.commit(self.state, r.version, r.members, r.lost))
                return Done(request=r.request), ()
            case SetPhase():
                self._set(control.set_phase(self.state, r.phase, r.error))
                return Done(request=r.request), ()
            case Join():
                self._set(control.join(self.state, r.member, now))
                return self.run_state(r.request), ()
            case Leave():
                level = logging.INFO if r.reason == "stopped" else logging.WARNING
                log.log(level, "%s (incarnation %d) left: %s", r.name, r.incarnation, r.reason)
                self._set(control.leave(self.state, MemberId(name=r.name, incarnation=r.incarnation)))
                return Done(request=r.request), ()
            case AskTickets():
                return self._tickets(r, now), ()
            case PutGroup():
                return self._put(r, frames), ()
            case ReturnTicket():
                if r.trajectories < 0:
                    raise Rejected("bad_request", f"{r.trajectories} trajectories")
                self.ledger.give_back(*self._slot(r.ticket), r.fate, r.trajectories)
                return Done(request=r.request), ()
            case Take():
                return self._take(r), ()
            case Fetch():
                return self._fetch(r)
            case FetchRows():
                return self._fetch_rows(r)
            case Consumed():
                self._must_have_begun()
                batch = [self._groups[i] for i in self.ledger.taken] if self.ledger.taken_step == r.step else []
                cursor, counters = self.ledger.consume(r.step)
                if batch:
                    self._trained(r.step, self._taken_version, batch)
                self._prune()
                self._set(control.step_done(self.state, r.step))
                return ConsumedResult(request=r.request, cursor=cursor, counters=counters), ()

    def _set(self, state: ControlState) -> None:
        if state is not self.state:
            self._save(state)
            self.state = state

    def _acquire(self, r: AcquireLease) -> None:
        before = self.state.epoch
        self._set(control.acquire(self.state, r.holder))
        if self.state.epoch != before:
            log.info("lease %d: %s owns the run", self.state.epoch, r.holder)

    def _begin(self, r: Begin) -> None:
        same = self._begun_with
        if same is not None and self.state.begun and same.epoch == r.epoch:
            if (same.step, same.cursor, same.counters) == (r.step, r.cursor, r.counters):
                return
            raise Rejected("bad_request", f"the run has begun at step {same.step} under this lease")
        state = control.begin(self.state, r.step)
        self.ledger.begin(r.step, r.cursor, r.counters)
        self._begun_with = r
        self._prune()
        self._set(state)

    def _must_have_begun(self) -> None:
        if not self.state.begun:
            raise Rejected("phase", "the run has not begun here (if the buffer was started again: resume the run)")

    def _tickets(self, r: AskTickets, now: float) -> Tickets:
        if r.wanted < 0:
            raise Rejected("bad_request", f"{r.wanted} credits wanted")
        epoch = self.state.epoch
        slots: list[Slot] = []
        if self.state.begun:
            holding = {(t.index, t.attempt) for t in r.holding if t.epoch == epoch}
            new = self.state.phase in ("starting", "running")
            slots = self.ledger.grant(r.sender, r.wanted, holding, self.state.version, now, new=new)
        return Tickets(
            request=r.request,
            tickets=tuple(Ticket(index=index, attempt=attempt, epoch=epoch) for index, attempt in slots),
            retry_after=0.0 if slots else self.timing.retry_s,
            state=self.run_state(r.request),
        )

    def _slot(self, t: Ticket) -> Slot:
        if t.epoch != self.state.epoch:
            raise Rejected("stale_epoch", f"credit {t.index} is of lease {t.epoch}, the newest is {self.state.epoch}")
        self._must_have_begun()
        return t.index, t.attempt

    def _put(self, r: PutGroup, frames: Sequence[Frame]) -> PutResult:
        index, attempt = self._slot(r.ticket)
        by_field, digests = check_group(r, frames)
        if r.failed < 0:
            raise Rejected("bad_request", f"{r.failed} failed samples")
        sampled = [h.oldest_version for h in r.headers if h.sampled > 0]
        if not sampled:
            self.ledger.give_back(index, attempt, "failed", len(r.headers) + r.failed)
            return PutResult(request=r.request, held=False, reason="no sampled token in the whole group")
        result = self.ledger.put(index, attempt, len(r.headers), min(sampled), failed=r.failed)
        if result.fresh:
            self._groups[index] = Held(r.ticket, r.headers, by_field, digests)
        return PutResult(request=r.request, held=result.held, reason=result.reason)

    def _take(self, r: Take) -> Batch | NotReady:
        self._must_have_begun()
        indices = self.ledger.take(r.step, r.version, r.groups)
        self._prune()
        state = self.run_state(r.request)
        if indices is None:
            return NotReady(request=r.request, held=len(self.ledger.held), state=state)
        self._taken_version = r.version
        groups = (self._groups[i] for i in indices)
        held = tuple(HeldGroup(ticket=g.ticket, headers=g.headers) for g in groups)
        return Batch(request=r.request, step=r.step, groups=held, state=state)

    def _fetch(self, r: Fetch) -> _Answer:
        owner = self._taken(r.step)
        index: list[tuple[str, str]] = []
        found: list[Frame] = []
        for trajectory in r.trajectories:
            group = _held_in(owner, trajectory, r.step)
            for field in r.fields:
                frame = group.frames.get((trajectory, field))
                if frame is not None:
                    index.append((trajectory, field))
                    found.append(frame)
        return Frames(request=r.request, index=tuple(index)), found

    def _fetch_rows(self, r: FetchRows) -> _Answer:
        owner = self._taken(r.step)
        index: list[tuple[str, str]] = []
        found: list[Frame] = []
        for cut in r.cuts:
            group = _held_in(owner, cut.trajectory, r.step)
            index.append((cut.trajectory, ROUTING))
            found.append(cut_frame(group.header(cut.trajectory), group.frames, cut, r.blocks))
        for trajectory in r.digests:
            group = _held_in(owner, trajectory, r.step)
            index.append((trajectory, DIGESTS))
            found.append(cut_digests(trajectory, group.digests, r.blocks))
        return Frames(request=r.request, index=tuple(index)), found

    def _taken(self, step: int) -> dict[str, Held]:
        """The groups of the taken batch by trajectory."""
        self._must_have_begun()
        if self.ledger.taken_step != step:
            raise Rejected("unknown", f"step {step} is not the taken batch ({self.ledger.taken_step or 'none'})")
        return {h.identity.trajectory: self._groups[i] for i in self.ledger.taken for h in self._groups[i].headers}

    def _prune(self) -> None:
        """Free the frames of what was consumed, went stale or was forgotten."""
        for index in self._groups.keys() - self.ledger.kept():
            del self._groups[index]


def _held_in(owner: Mapping[str, Held], trajectory: str, step: int) -> Held:
    group = owner.get(trajectory)
    if group is None:
        raise Rejected("unknown", f"trajectory {trajectory} is not in the batch of step {step}")
    return group


def check_group(r: PutGroup, frames: Sequence[Frame]) -> tuple[dict[tuple[str, str], Frame], dict[str, RowDigests]]:
    """The group's frames by trajectory and field, and the digests of the routing rows by trajectory.

    Raises `ContractViolation` unless headers, frames and their digests fit each other and the credit.
    """
    if not r.headers:
        raise ContractViolation(f"group {r.ticket.index}: no trajectories")
    listed = sum(len(h.frames) for h in r.headers)
    if listed != len(frames):
        raise ContractViolation(f"group {r.ticket.index}: {len(frames)} frames arrived, its headers list {listed}")
    found: dict[tuple[str, str], Frame] = {}
    names: set[str] = set()
    at = 0
    for h in r.headers:
        name = h.identity.trajectory
        if name in names:
            raise ContractViolation(f"group {r.ticket.index}: trajectory {name} is there twice")
        names.add(name)
        if (h.identity.index, h.identity.attempt) != (r.ticket.index, r.ticket.attempt):
            raise ContractViolation(
                f"trajectory {name}: belongs to instance {h.identity.index} attempt {h.identity.attempt}, "
                f"the credit is for {r.ticket.index} attempt {r.ticket.attempt}"
            )
        own = frames[at : at + len(h.frames)]
        at += len(h.frames)
        found.update({(name, spec.field): frame for spec, frame in zip(h.frames, own, strict=True)})
    arrays = arrays_of_group(r.headers, frames)
    digests: dict[str, RowDigests] = {}
    for h in r.headers:
        _, columns = check_binding(h, arrays[h.identity.trajectory])
        if columns:
            digests[h.identity.trajectory] = tuple(columns.values())
    return found, digests
