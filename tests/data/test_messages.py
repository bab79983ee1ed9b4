"""Messages are typed: what does not fit is refused before anybody acts on it."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.buffer.codec import decode_reply, decode_request, encode, request_number
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.wire import encode as encode_trajectory
from tests.data.samples import trajectory

HEADER = encode_trajectory(trajectory())[0]
TICKET = m.Ticket(index=7, attempt=1, epoch=3)
MEMBER = m.Member(
    name="engine-0", url="http://h:1", incarnation=2, world_size=1, state="serving", version=4, heartbeat=1.5
)
R: dict[str, Any] = {"epoch": 3, "sender": "trainer-0", "request": 9}
STATE = m.RunState(
    request=9, phase="running", error=None, epoch=3, version=4, step=4, members=(MEMBER,), held=1, capacity=8, issued=2,
    counters=m.Counters(sampled=5),
)  # fmt: skip
CURSOR = m.Cursor(watermark=3, done=(5, 8))
REQUESTS: list[m.AnyRequest] = [
    m.GetState(**R),
    m.AcquireLease(**R, holder="trainer-0/x"),
    m.Begin(**R, step=4, cursor=CURSOR, counters=m.Counters(sampled=5)),
    m.Commit(**R, version=4, members=(MEMBER.id,), lost=()),
    m.SetPhase(**R, phase="failed", error="why"),
    m.Join(**R, member=MEMBER),
    m.Leave(**R, name="engine-0", incarnation=2, reason="died"),
    m.AskTickets(**R, wanted=4, holding=(TICKET,)),
    m.PutGroup(**R, ticket=TICKET, headers=(HEADER,), failed=1),
    m.ReturnTicket(**R, ticket=TICKET, fate="filtered", reason="uniform", trajectories=2),
    m.Take(**R, step=5, version=4, groups=2),
    m.FetchRows(**R, step=5, blocks=(0, 2), cuts=(m.RowCut("a", ((0, 4), (7, 9))),), digests=("a", "b")),
    m.Fetch(**R, step=5, trajectories=("a",), fields=("tokens",)),
    m.Consumed(**R, step=5),
]
REPLIES: list[m.AnyReply] = [
    STATE,
    m.Lease(request=9, lease=4),
    m.Tickets(request=9, tickets=(TICKET,), retry_after=0.1, state=STATE),
    m.PutResult(request=9, held=False, reason="stale"),
    m.Batch(request=9, step=5, groups=(m.HeldGroup(ticket=TICKET, headers=(HEADER,)),), state=STATE),
    m.NotReady(request=9, held=1, state=STATE),
    m.Frames(request=9, index=(("a", "tokens"),)),
    m.ConsumedResult(request=9, cursor=CURSOR, counters=m.Counters(trained=2)),
    m.Done(request=9),
    m.Refused(request=9, code="stale_epoch", reason="lease 2 is over"),
]


def test_every_kind_of_message_is_here() -> None:
    assert {type(r) for r in REQUESTS} == set(get_args(m.AnyRequest))
    assert {type(r) for r in REPLIES} == set(get_args(m.AnyReply))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_come_back_as_they_were_sent(request_: m.AnyRequest) -> None:
    assert decode_request(encode(request_)) == request_
    with pytest.raises(msgspec.ValidationError):
        decode_reply(encode(request_))


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_come_back_as_they_were_sent(reply: m.AnyReply) -> None:
    assert decode_reply(encode(reply)) == reply
    with pytest.raises(msgspec.ValidationError):
        decode_request(encode(reply))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_without_one_of_its_fields_is_refused(request_: m.AnyRequest) -> None:
    whole = msgspec.msgpack.decode(encode(request_))
    for name in set(whole) - {"error"}:
        part = {k: v for k, v in whole.items() if k != name}
        with pytest.raises(msgspec.ValidationError):
            decode_request(msgspec.msgpack.encode(part))


@pytest.mark.parametrize(
    ("field", "value"),
    [("epoch", "3"), ("request", None), ("step", 1.5), ("groups", "all"), ("sender", 7), ("type", "Exec")],
)
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    whole = msgspec.msgpack.decode(encode(m.Take(**R, step=5, version=4, groups=2)))
    with pytest.raises(msgspec.ValidationError):
        decode_request(msgspec.msgpack.encode({**whole, field: value}))


def test_a_refused_message_still_gives_its_number_away() -> None:
    assert request_number(msgspec.msgpack.encode({"type": "Exec", "request": 12})) == 12
    for bad in (b"", b"\xc1", b"\xff\xff", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"request": "x"})):
        assert request_number(bad) == 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_garbage_is_never_taken_for_a_request(garbage: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        decode_request(garbage)
    request_number(garbage)
