"""Every message between our processes: typed msgpack, checked on arrival, nothing executable.

A message is one msgpack frame, followed by raw frames where its docstring says so. A request carries the sender's
`epoch` (the trainer's lease as the sender knows it, 0 before it knows one); a reply is one of the structs below or
`Refused`. The buffer's process answers all of them; `control` is the state that it serves.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moe_asyncrl.data.wire import TrajectoryHeader

Phase = Literal["starting", "running", "finishing", "finished", "failed"]
MemberState = Literal["joining", "serving", "quarantined"]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of every message."""


class Request(Message, frozen=True, kw_only=True):
    """Base of what is asked."""

    epoch: int
    sender: str
    """Role and number, for example `trainer-0`."""
    request: int
    """Number of the request, echoed in the reply."""


class Reply(Message, frozen=True, kw_only=True):
    """Base of what is answered."""

    request: int


# --- control -----------------------------------------------------------------------------------------------------


class MemberId(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one engine: a server that was started again under the same name is another one."""

    name: str
    incarnation: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the run knows it."""

    name: str
    url: str
    incarnation: int
    """Rises each time that the engine's server is started."""
    world_size: int
    """Ranks of the engine that receive weights (its tensor-parallel size)."""
    state: MemberState
    version: int
    """The committed version it serves; -1 before its first."""
    nccl: str = ""
    """NCCL version of the engine's PyTorch, as `2.27.3`; empty without a GPU or without NCCL."""
    heartbeat: float
    """Unix time of the last sign of life, in seconds, by the buffer's clock; what the sender puts here is not read."""

    @property
    def id(self) -> MemberId:
        """This life of the engine."""
        return MemberId(name=self.name, incarnation=self.incarnation)


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Which prompt instances are done: all below `watermark`, and those listed above it."""

    watermark: int = 0
    done: tuple[int, ...] = ()


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories by fate since the run began (resumes included)."""

    sampled: int = 0
    trained: int = 0
    stale: int = 0
    filtered: int = 0
    failed: int = 0


class RunState(Reply, frozen=True, kw_only=True):
    """The state of the run, whole: small enough to send on every question."""

    phase: Phase
    error: str | None
    epoch: int
    version: int
    """The committed policy version; -1 before the first commit."""
    step: int
    """Trainer steps done."""
    members: tuple[Member, ...]
    held: int
    """Groups in the buffer, waiting to be trained."""
    capacity: int
    issued: int
    """Groups that samplers may be working on."""
    counters: Counters


class GetState(Request, frozen=True, kw_only=True):
    """Asks for `RunState`."""


class AcquireLease(Request, frozen=True, kw_only=True):
    """A trainer asks to own the run. Answered by `Lease` with an epoch above every earlier one."""

    holder: str
    """Unique to the process that asks: asking again under the same name answers the same lease."""


class Lease(Reply, frozen=True, kw_only=True):
    """Ownership of the run until a newer lease is given."""

    lease: int


class Begin(Request, frozen=True, kw_only=True):
    """The owner says where the run stands (fresh or resumed). Tickets are issued only after it. Answered by `Done`."""

    step: int
    cursor: Cursor
    counters: Counters


class Commit(Request, frozen=True, kw_only=True):
    """Weights `version` are on every engine in `members`; `lost` are quarantined. Answered by `Done`.

    An engine that was started again since the update began is named by a life that is over, and stays `joining`.
    """

    version: int
    members: tuple[MemberId, ...]
    lost: tuple[MemberId, ...]


class SetPhase(Request, frozen=True, kw_only=True):
    """Moves the run on, or ends it with an error. Answered by `Done`.

    The first `Commit` moves `starting` to `running`.
    """

    phase: Phase
    error: str | None = None


class Join(Request, frozen=True, kw_only=True):
    """An engine is up and wants weights. Sending it again is a sign of life.

    Answered by `RunState`: there the engine sees itself, and starts anew with a higher incarnation if quarantined.
    """

    member: Member


class Leave(Request, frozen=True, kw_only=True):
    """An engine is gone. Answered by `Done`."""

    name: str
    incarnation: int
    reason: str


# --- rollout side ------------------------------------------------------------------------------------------------


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A credit: the right to sample one group for prompt instance `index`. It is used up or given back."""

    index: int
    attempt: int
    epoch: int = 0
    """The lease under which it was issued; void under any other."""


class AskTickets(Request, frozen=True, kw_only=True):
    """Asks for up to `wanted` credits. Answered by `Tickets`.

    Credits that the buffer thinks this sender has and that are not in `holding` were lost on the way (or with the
    process that had the sender's name before), and are granted first. So asking twice grants nothing twice.
    """

    wanted: int
    holding: tuple[Ticket, ...]


class Tickets(Reply, frozen=True, kw_only=True):
    """Credits granted now, maybe none: then ask again after `retry_after` seconds."""

    tickets: tuple[Ticket, ...]
    retry_after: float
    state: RunState


class PutGroup(Request, frozen=True, kw_only=True):
    """A finished group; the frames of its trajectories follow, in order. Answered by `PutResult`."""

    ticket: Ticket
    headers: tuple[TrajectoryHeader, ...]
    failed: int
    """Samples of the group that are not among them: cut off, or without a score. For the account."""


class PutResult(Reply, frozen=True, kw_only=True):
    """`held`: the group is in the buffer's memory. Otherwise why not; the sender forgets the group either way."""

    held: bool
    reason: str = ""


class ReturnTicket(Request, frozen=True, kw_only=True):
    """The credit was not used up: the group failed or was filtered. Answered by `Done`."""

    ticket: Ticket
    fate: Literal["failed", "filtered", "unused"]
    reason: str
    trajectories: int
    """Trajectories sampled for it, for the account."""


# --- trainer side ------------------------------------------------------------------------------------------------


class HeldGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Headers of one group in the buffer."""

    ticket: Ticket
    headers: tuple[TrajectoryHeader, ...]


class Take(Request, frozen=True, kw_only=True):
    """The owner takes `groups` groups for the step that starts from weights `version`.

    Answered by `Batch` or `NotReady`.
    `step` is the number that the step will have: steps done plus one. Groups whose oldest token would be more than the
    staleness bound behind `version` go stale now. Taking with the number of a batch that was taken and not consumed
    answers the same batch again.
    """

    step: int
    version: int
    groups: int


class Batch(Reply, frozen=True, kw_only=True):
    """A whole batch: exactly as many groups as were asked for."""

    step: int
    groups: tuple[HeldGroup, ...]
    state: RunState


class NotReady(Reply, frozen=True, kw_only=True):
    """Too few groups are held; ask again."""

    held: int
    state: RunState


class Fetch(Request, frozen=True, kw_only=True):
    """Any trainer rank asks for `fields` of trajectories in the batch of `step`. Answered by `Frames`."""

    step: int
    trajectories: tuple[str, ...]
    fields: tuple[str, ...]
    """Wire fields; a field that a trajectory lacks is left out."""


class RowCut(msgspec.Struct, frozen=True, array_like=True):
    """Rows of the frame that a trajectory itself carries (shared ones are in front of it, in another's frame)."""

    trajectory: str
    ranges: tuple[tuple[int, int], ...]
    """[start, end) each, rising."""


class FetchRows(Request, frozen=True, kw_only=True):
    """A trainer rank asks for its part of the routing rows in the batch of `step`. Answered by `Frames`.

    First one frame for each of `cuts` (field `routing.experts`): its rows, of the MoE layers of `blocks`, in order.
    Then one for each of `digests` (field `routing.digests`): uint32 [blocks, T-1], the digests of all rows of a
    trajectory in these blocks, by which the headers' blocks and then the rows are checked.
    """

    step: int
    blocks: tuple[int, ...]
    """Numbers of the blocks of layers, as in the headers; rising."""
    cuts: tuple[RowCut, ...]
    digests: tuple[str, ...]


class Frames(Reply, frozen=True, kw_only=True):
    """Which (trajectory, field) each of the raw frames that follow is."""

    index: tuple[tuple[str, str], ...]


class Consumed(Request, frozen=True, kw_only=True):
    """The batch of `step` is in the trainer's weights. Answered by `ConsumedResult`."""

    step: int


class ConsumedResult(Reply, frozen=True, kw_only=True):
    """The cursor and account that a checkpoint taken now must hold."""

    cursor: Cursor
    counters: Counters


class Done(Reply, frozen=True, kw_only=True):
    """It is done."""


class Refused(Reply, frozen=True, kw_only=True):
    """Not done, and why. `stale_epoch`: the sender's lease is not the newest."""

    code: Literal["stale_epoch", "bad_request", "unknown", "full", "phase"]
    reason: str


AnyRequest = (
    GetState
    | AcquireLease
    | Begin
    | Commit
    | SetPhase
    | Join
    | Leave
    | AskTickets
    | PutGroup
    | ReturnTicket
    | Take
    | Fetch
    | FetchRows
    | Consumed
)
AnyReply = RunState | Lease | Tickets | PutResult | Batch | NotReady | Frames | ConsumedResult | Done | Refused
