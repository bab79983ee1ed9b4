"""What the buffer answers, without sockets: leases, credits, groups, batches, frames."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_asyncrl.buffer.service import BufferService, Timing
from moe_asyncrl.control.state import ControlState
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.wire import FrameSpec, array_from
from tests.buffer.harness import Ask, begun, member, packed, service
from tests.data.samples import group

NOTHING = m.Counters()


def tickets(to: BufferService, wanted: int = 9, sender: str = "rollout-0", now: float = 0.0) -> tuple[m.Ticket, ...]:
    ask = Ask(to, sender)
    ask.now = now
    holding = tuple(m.Ticket(index=e.index, attempt=e.attempt, epoch=to.state.epoch) for e in to.ledger.issued.values())
    granted: tuple[m.Ticket, ...] = ask(m.AskTickets, wanted=wanted, holding=holding).tickets
    return granted


# ---- leases


REQUESTS: dict[type[m.Request], dict[str, Any]] = {
    m.GetState: {},
    m.Begin: {"step": 0, "cursor": m.Cursor(), "counters": NOTHING},
    m.Commit: {"version": 1, "members": (), "lost": ()},
    m.SetPhase: {"phase": "failed"},
    m.Join: {"member": member()},
    m.Leave: {"name": "engine-0", "incarnation": 1, "reason": ""},
    m.AskTickets: {"wanted": 1, "holding": ()},
    m.PutGroup: {"ticket": m.Ticket(index=0, attempt=0, epoch=1), "headers": (), "failed": 0},
    m.ReturnTicket: {
        "ticket": m.Ticket(index=0, attempt=0, epoch=1), "fate": "failed", "reason": "", "trajectories": 1,
    },
    m.Take: {"step": 1, "version": 0, "groups": 2},
    m.Fetch: {"step": 1, "trajectories": (), "fields": ()},
    m.FetchRows: {"step": 1, "blocks": (0,), "cuts": (), "digests": ()},
    m.Consumed: {"step": 1},
    m.AcquireLease: {"holder": "old"},
}  # fmt: skip


def test_every_request_is_tried_below() -> None:
    assert set(REQUESTS) == set(m.AnyRequest.__args__)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda k: k.__name__)
def test_an_older_lease_is_refused_everywhere_and_changes_nothing(kind: type[m.Request]) -> None:
    to = service()
    old = begun(to, holder="old")
    new = begun(to, holder="new")
    before = to.run_state()
    reply = old(kind, **REQUESTS[kind])
    assert isinstance(reply, m.Refused)
    assert reply.code == "stale_epoch"
    assert "lease 2 is held by new" in reply.reason
    assert to.run_state() == before
    assert isinstance(new(m.GetState), m.RunState)


def test_of_two_trainers_the_older_copy_can_neither_take_nor_consume_nor_commit() -> None:
    to = service()
    first = begun(to, holder="first copy")
    for t in tickets(to):
        Ask(to, "rollout-0").put(t)
    taken = first(m.Take, step=1, version=0, groups=2)
    assert isinstance(taken, m.Batch)
    second = begun(to, holder="second copy")
    for kind in (m.Take, m.Consumed, m.Commit, m.Fetch, m.SetPhase):
        assert first(kind, **REQUESTS[kind]).code == "stale_epoch"
    assert to.ledger.counters.trained == 0
    assert to.bytes_held == 0, "what the first copy had is freed"
    fresh = tickets(to)
    assert [t.index for t in fresh] == [0, 1, 2, 3, 4, 5], "and will be sampled again"
    assert {t.epoch for t in fresh} == {second.epoch}


def test_work_for_an_older_lease_is_not_held_under_a_newer_one() -> None:
    to = service()
    begun(to, holder="a")
    (old, *_) = tickets(to)
    begun(to, holder="b")
    (new, *_) = tickets(to)
    assert (old.index, old.attempt) == (new.index, new.attempt)
    ask = Ask(to, "rollout-0")
    assert ask.put(old).code == "stale_epoch"
    headers, frames = packed(group(old.index))
    assert ask(m.PutGroup, frames, ticket=old, headers=headers, failed=0, epoch=new.epoch).code == "stale_epoch"
    assert ask.put(new).held


@pytest.mark.parametrize("kind", [m.Begin, m.Commit, m.Take, m.Fetch, m.Consumed, m.PutGroup, m.ReturnTicket])
def test_nobody_acts_for_a_run_without_a_lease(kind: type[m.Request]) -> None:
    for to in (service(), service(state=ControlState(epoch=3))):
        assert isinstance(Ask(to)(kind, **REQUESTS[kind]), m.Refused)


def test_anybody_may_end_a_run_that_nobody_owns_yet() -> None:
    to = service()
    assert isinstance(Ask(to, "rollout-0")(m.SetPhase, phase="failed", error="no prompts"), m.Done)
    assert to.run_state().error == "no prompts"


def test_a_lease_that_is_asked_for_twice_is_the_same() -> None:
    to = service()
    ask = Ask(to)
    assert ask(m.AcquireLease, holder="x").lease == ask(m.AcquireLease, holder="x").lease == 1
    assert ask(m.AcquireLease, holder="y").lease == 2


def test_a_new_state_is_saved_before_anybody_hears_of_it() -> None:
    saved: list[ControlState] = []
    to = service(save=saved.append)
    begun(to)
    assert [s.epoch for s in saved] == [0, 1, 1, 1]
    assert saved[-1] == to.state

    def full(state: ControlState) -> None:
        raise OSError("no space left")

    to = service()
    to._save = full
    with pytest.raises(OSError, match="no space"):
        Ask(to)(m.AcquireLease, holder="x")
    assert to.state.epoch == 0


def test_begin_may_come_twice_but_not_differ() -> None:
    to = service()
    ask = begun(to)
    granted = tickets(to, 2)
    assert isinstance(ask(m.Begin, step=0, cursor=m.Cursor(), counters=NOTHING), m.Done)
    assert len(to.ledger.issued) == len(granted) == 2
    assert to.state.version == 0
    assert ask(m.Begin, step=4, cursor=m.Cursor(), counters=NOTHING).code == "bad_request"


# ---- credits


def test_no_credits_before_begin_and_commit_nor_when_the_run_is_finishing() -> None:
    to = service()
    assert tickets(to) == ()
    ask = Ask(to)
    ask.epoch = ask(m.AcquireLease, holder="t").lease
    ask(m.Begin, step=0, cursor=m.Cursor(), counters=NOTHING)
    assert tickets(to) == ()
    ask(m.Commit, version=0, members=(), lost=())
    first = tickets(to, 2)
    assert len(first) == 2
    ask(m.SetPhase, phase="finishing")
    reply = Ask(to, "rollout-0")(m.AskTickets, wanted=4, holding=first)
    assert reply.tickets == ()
    assert reply.retry_after > 0
    assert reply.state.phase == "finishing"
    assert Ask(to, "rollout-0").put(first[0]).held, "what is under way may still arrive"


def test_any_request_is_a_sign_of_life() -> None:
    to = service(timing=Timing(sampler_silent_s=10))
    begun(to)
    assert len(tickets(to, 2, "rollout-0")) == len(tickets(to, 2, "rollout-1")) == 2
    ask = Ask(to, "rollout-0")
    for now in (8.0, 16.0, 24.0):
        ask.now = now
        ask(m.GetState)
        to.tick(now)
    assert {e.holder for e in to.ledger.issued.values()} == {"rollout-0"}
    to.tick(35.0)
    assert to.ledger.issued == {}
    assert [(t.index, t.attempt) for t in tickets(to, 4, "rollout-2", 35.0)] == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_silent_engine_is_left_out() -> None:
    to = service(timing=Timing(engine_silent_s=5))
    ask = Ask(to, "engine-0")
    seen = ask(m.Join, member=member())
    assert [x.name for x in seen.members] == ["engine-0"]
    to.tick(4.0)
    assert len(to.state.members) == 1
    to.tick(6.0)
    assert to.state.members == ()


# ---- groups

Break = Any


def drop_frame(headers: Any, frames: Any) -> tuple[Any, Any]:
    return headers, frames[:-1]


def extra_frame(headers: Any, frames: Any) -> tuple[Any, Any]:
    return headers, [*frames, b"1234"]


def cut_frame(headers: Any, frames: Any) -> tuple[Any, Any]:
    return headers, [frames[0][:-4], *frames[1:]]


def swap_frames(headers: Any, frames: Any) -> tuple[Any, Any]:
    n = len(headers[0].frames)
    at = [s.field for s in headers[0].frames].index("routing.experts")
    frames = list(frames)
    frames[at], frames[n + at] = frames[n + at], frames[at]
    return headers, frames


def other_schema(headers: Any, frames: Any) -> tuple[Any, Any]:
    return (msgspec.structs.replace(headers[0], schema=1), *headers[1:]), frames


def other_type(headers: Any, frames: Any) -> tuple[Any, Any]:
    h = headers[0]
    specs = (FrameSpec("tokens", "<i8", h.frames[0].shape), *h.frames[1:])
    return (msgspec.structs.replace(h, frames=specs), *headers[1:]), frames


def no_headers(headers: Any, frames: Any) -> tuple[Any, Any]:
    return (), ()


def same_name(headers: Any, frames: Any) -> tuple[Any, Any]:
    half = len(frames) // 2
    return (headers[0], headers[0]), [*frames[:half], *frames[:half]]


BREAKS: dict[Break, str] = {
    drop_frame: "9 frames arrived, its headers list 10",
    extra_frame: "11 frames arrived, its headers list 10",
    cut_frame: "'tokens' has 44 bytes, its header says 48",
    swap_frames: "do not belong to these tokens",
    other_schema: "schema 1",
    other_type: "'<i8' is not allowed",
    no_headers: "no trajectories",
    same_name: "there twice",
}


@pytest.mark.parametrize("how", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_group_is_refused_and_its_credit_can_still_be_used(how: Break) -> None:
    to = service()
    begun(to)
    (ticket,) = tickets(to, 1)
    headers, frames = how(*packed(group(ticket.index)))
    ask = Ask(to, "rollout-0")
    reply = ask(m.PutGroup, frames, ticket=ticket, headers=headers, failed=0, epoch=ticket.epoch)
    assert (reply.code, BREAKS[how] in reply.reason) == ("bad_request", True), reply
    assert to.bytes_held == 0
    assert ask.put(ticket).held


def test_a_group_for_another_credit_is_refused() -> None:
    to = service()
    begun(to)
    a, b = tickets(to, 2)
    reply = Ask(to, "rollout-0").put(a, group(b.index))
    assert reply.code == "bad_request"
    assert "belongs to instance 1 attempt 0, the credit is for 0 attempt 0" in reply.reason


def test_a_group_without_a_sampled_token_counts_as_failed() -> None:
    to = service()
    begun(to)
    (ticket,) = tickets(to, 1)
    nothing = {"loss_mask": np.zeros(12, dtype=bool), "weight_version": np.full(12, -1, dtype=np.int32)}
    headers, frames = packed([dataclasses.replace(t, **nothing) for t in group(ticket.index)])  # type: ignore[arg-type]
    reply = Ask(to, "rollout-0")(m.PutGroup, frames, ticket=ticket, headers=headers, failed=0, epoch=ticket.epoch)
    assert not reply.held
    assert to.ledger.counters.failed == 2


def test_frames_where_none_belong_are_refused() -> None:
    assert Ask(service())(m.GetState, [b"x"]).code == "bad_request"


@pytest.mark.parametrize(
    ("kind", "change"),
    [(m.AskTickets, {"wanted": -1}), (m.Take, {"groups": 0}), (m.Take, {"groups": 99}), (m.Take, {"step": 7})],
)
def test_numbers_out_of_range_are_refused(kind: type[m.Request], change: dict[str, Any]) -> None:
    ask = begun(service())
    assert ask(kind, **{**REQUESTS[kind], **change}).code == "bad_request"


# ---- batches


def filled(wanted: int = 4) -> tuple[BufferService, Ask]:
    to = service()
    ask = begun(to)
    for t in tickets(to, wanted):
        assert Ask(to, "rollout-0").put(t).held
    return to, ask


def test_headers_first_and_then_only_the_frames_that_are_asked_for() -> None:
    _, ask = filled()
    batch = ask(m.Take, step=1, version=0, groups=2)
    assert [g.ticket.index for g in batch.groups] == [0, 1]
    assert ask.frames == ()
    h = batch.groups[1].headers[1]
    reply = ask(
        m.Fetch, step=1, trajectories=(h.identity.trajectory,), fields=("tokens", "teacher_logprobs", "logprobs")
    )
    assert reply.index == (("1.0.1", "tokens"), ("1.0.1", "logprobs"))
    sent = group(1)[1]
    specs = {s.field: s for s in h.frames}
    np.testing.assert_array_equal(array_from(specs["tokens"], ask.frames[0], trajectory=""), sent.tokens)
    np.testing.assert_array_equal(array_from(specs["logprobs"], ask.frames[1], trajectory=""), sent.logprobs)


def test_a_batch_is_whole_or_not_ready() -> None:
    _, ask = filled(1)
    reply = ask(m.Take, step=1, version=0, groups=2)
    assert (type(reply), reply.held) == (m.NotReady, 1)


def test_memory_is_freed_when_a_batch_is_consumed_and_not_before() -> None:
    to, ask = filled(4)
    full = to.bytes_held
    ask(m.Take, step=1, version=0, groups=2)
    assert to.bytes_held == full
    result = ask(m.Consumed, step=1)
    assert to.bytes_held == full // 2
    assert result == ask(m.Consumed, step=1, request=result.request), "asked again, answered the same"
    assert (result.cursor, result.counters.trained) == (m.Cursor(watermark=2), 4)
    assert to.run_state().step == 1
    gone = ask(m.Fetch, step=1, trajectories=("0.0.0",), fields=("tokens",))
    assert gone.code == "unknown"


def test_memory_stays_bounded_over_many_steps() -> None:
    to = service()
    ask = begun(to)
    sizes = []
    for step in range(1, 60):
        for t in tickets(to):
            Ask(to, "rollout-0").put(t, version=step - 1)
        sizes.append(to.bytes_held)
        assert isinstance(ask(m.Take, step=step, version=step - 1, groups=2), m.Batch)
        ask(m.Consumed, step=step)
        ask(m.Commit, version=step, members=(), lost=())
    assert max(sizes[30:]) == max(sizes[:30])
    assert len(to.ledger._done) == 0


def test_stale_groups_are_freed_too() -> None:
    to, ask = filled(6)
    for step in (1, 2, 3):
        ask(m.Take, step=step, version=step - 1, groups=2)
        ask(m.Consumed, step=step)
        ask(m.Commit, version=step, members=(), lost=())
    assert to.bytes_held == 0
    assert to.ledger.counters.trained == 12


def test_a_trajectory_that_is_not_in_the_batch_is_not_given_out() -> None:
    _, ask = filled(4)
    ask(m.Take, step=1, version=0, groups=2)
    reply = ask(m.Fetch, step=1, trajectories=("3.0.0",), fields=("tokens",))
    assert (reply.code, "3.0.0" in reply.reason) == ("unknown", True)


def test_a_buffer_that_was_started_again_says_so_to_the_trainer() -> None:
    """It knows the lease from its file, and that it has lost the run."""
    ask = Ask(service(state=ControlState(epoch=3)), epoch=3)
    reply = ask(m.Take, step=5, version=4, groups=2)
    assert (reply.code, "resume the run" in reply.reason) == ("phase", True)
