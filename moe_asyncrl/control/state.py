"""The state of the run as a frozen value, and every change to it as a function.

    phase:   starting ─▶ running ─▶ finishing ─▶ finished        any but finished ─▶ failed
    member:  joining ─▶ serving ─▶ joining (an update left it out) …       any ─▶ quarantined ─▶ (next life) joining

The owner of the run is the process with the newest lease; its epoch is in every message, and an older one is refused.
Times are passed in, so that nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from moe_asyncrl.data.messages import Member, MemberId, Phase

Code = Literal["stale_epoch", "bad_request", "unknown", "full", "phase"]

_ORDER: dict[Phase, int] = {"starting": 0, "running": 1, "finishing": 2, "finished": 3, "failed": 4}
_replace = msgspec.structs.replace


class Rejected(Exception):
    """A change that the state does not allow. `code` is one of `Refused.code`."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the run."""

    phase: Phase = "starting"
    error: str | None = None
    epoch: int = 0
    """Number of the newest lease; it only rises, also when the process that serves it starts again."""
    holder: str = ""
    """Who has that lease."""
    begun: bool = False
    """True once the holder said where the run stands."""
    step: int = 0
    """Trainer steps done."""
    version: int = -1
    """Committed policy version; -1 before the first commit of this lease."""
    members: tuple[Member, ...] = ()

    @property
    def over(self) -> bool:
        """True when the run has ended, well or not."""
        return self.phase in ("finished", "failed")


def check_epoch(state: ControlState, epoch: int, *, may_be_unknown: bool) -> None:
    """Raise `Rejected` unless `epoch` is the newest one, or 0 where the sender need not know it."""
    if (epoch == 0 and may_be_unknown) or (epoch == state.epoch and epoch > 0):
        return
    if state.epoch == 0:
        raise Rejected("phase", f"nobody owns the run yet, and lease {epoch} cannot act for it")
    if epoch < state.epoch:
        raise Rejected(
            "stale_epoch", f"lease {epoch} is over: lease {state.epoch} is held by {state.holder or 'nobody'}"
        )
    raise Rejected("bad_request", f"lease {epoch} was never given; the newest is {state.epoch}")


def acquire(state: ControlState, holder: str) -> ControlState:
    """Give the run to `holder`. The same holder asking again keeps its lease; anybody else takes it over."""
    if state.holder == holder and state.epoch > 0:
        return state
    return _replace(
        _forget_weights(state), phase="starting", error=None, epoch=state.epoch + 1, holder=holder, begun=False
    )


def begin(state: ControlState, step: int) -> ControlState:
    """The owner starts, or goes on, after `step` steps. No engine has its weights yet."""
    if step < 0:
        raise Rejected("bad_request", f"begin: {step} steps done")
    return _replace(_forget_weights(state), begun=True, step=step)


def commit(
    state: ControlState, version: int, members: Collection[MemberId], lost: Collection[MemberId]
) -> ControlState:
    """Weights `version` are on `members`; `lost` are quarantined.

    A life that is over is passed over in silence: its successor is joining and stays so. With a higher version,
    members that were neither named nor lost fall back to joining; with the same version (late joiners) they serve on.
    """
    if not state.begun:
        raise Rejected("phase", "commit before the run has begun")
    if state.over:
        raise Rejected("phase", f"commit after the run has {state.phase}")
    if version < max(state.version, 0):
        raise Rejected("bad_request", f"commit of version {version} after version {state.version}")

    def after(m: Member) -> Member:
        if m.id in lost or m.state == "quarantined":
            return _replace(m, state="quarantined")
        if m.id in members:
            return _replace(m, state="serving", version=version)
        if m.version != version:
            return _replace(m, state="joining")
        return m

    phase: Phase = "running" if state.phase == "starting" else state.phase
    return _replace(state, version=version, phase=phase, members=tuple(after(m) for m in state.members))


def set_phase(state: ControlState, phase: Phase, error: str | None) -> ControlState:
    """Move on. Raises `Rejected` for a step back, or away from an end."""
    if phase == state.phase:
        return state
    if state.over or _ORDER[phase] < _ORDER[state.phase]:
        raise Rejected("phase", f"the run is {state.phase} and cannot become {phase}")
    return _replace(state, phase=phase, error=error if phase == "failed" else None)


def step_done(state: ControlState, step: int) -> ControlState:
    """The trainer's weights contain `step` steps."""
    return _replace(state, step=step)


def join(state: ControlState, member: Member, now: float) -> ControlState:
    """A first or repeated sign of life of an engine, at `now` (Unix seconds).

    A new life begins as joining, whatever the sender says of itself. Raises `Rejected` for a life that is over.
    """
    known = next((m for m in state.members if m.name == member.name), None)
    if known is not None and member.incarnation < known.incarnation:
        raise Rejected(
            "unknown", f"{member.name} lives on as incarnation {known.incarnation}, not {member.incarnation}"
        )
    if known is not None and member.incarnation == known.incarnation:
        fresh = _replace(member, state=known.state, version=known.version, heartbeat=now)
    else:
        fresh = _replace(member, state="joining", version=-1, heartbeat=now)
    return _replace(state, members=_sorted((*(m for m in state.members if m.name != member.name), fresh)))


def leave(state: ControlState, life: MemberId) -> ControlState:
    """That life of the engine is over. A later one is not touched."""
    return _replace(state, members=tuple(m for m in state.members if m.id != life))


def expire(state: ControlState, now: float, silent_s: float) -> tuple[ControlState, tuple[MemberId, ...]]:
    """Remove engines without a sign of life for `silent_s` seconds. The state after, and who went.

    One that was only slow joins again, and gets weights before it serves.
    """
    gone = tuple(m.id for m in state.members if now - m.heartbeat > silent_s)
    if not gone:
        return state, ()
    return _replace(state, members=tuple(m for m in state.members if m.id not in gone)), gone


def _forget_weights(state: ControlState) -> ControlState:
    members = tuple(m if m.state == "quarantined" else _replace(m, state="joining", version=-1) for m in state.members)
    return _replace(state, version=-1, members=members)


def _sorted(members: Collection[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda m: m.name))
