"""Server and clients over real sockets: keys, bad messages, lost answers, deadlines."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq

from moe_asyncrl.buffer.aio import AsyncBufferClient
from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.buffer.codec import RequestRefused, decode_reply, encode
from moe_asyncrl.buffer.endpoint import Endpoint, connect, fixed
from moe_asyncrl.buffer.security import client_keys, ensure_keys, new_pair
from moe_asyncrl.buffer.server import BufferServer
from moe_asyncrl.buffer.service import BufferService
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.errors import DeadlineExceeded, StaleEpoch, UserError
from moe_asyncrl.data.wire import arrays_of
from tests.buffer.harness import CLIENT_KEYS, Running, begun, member, running, service
from tests.data.samples import group

GET = m.GetState(epoch=0, sender="x", request=5)


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def trainer(server: Running, **kwargs: Any) -> BufferClient:
    return BufferClient(server.find, CLIENT_KEYS, **{"sender": "trainer-0", "deadline_s": 20.0, **kwargs})


def sampler(server: Running, **kwargs: Any) -> AsyncBufferClient:
    return AsyncBufferClient(server.find, CLIENT_KEYS, **{"sender": "rollout-0", "deadline_s": 20.0, **kwargs})


def own_run(t: BufferClient) -> None:
    t.acquire_lease()
    t.begin(0, m.Cursor(), m.Counters())
    t.commit(0, [x.id for x in t.state().members], [])


# ---- the whole way


def test_a_group_goes_in_and_the_same_arrays_come_out(server: Running) -> None:
    sent = {i: group(i, tokens=400, layers=24, k=8) for i in range(2)}

    async def sample() -> None:
        async with sampler(server) as s:
            await s.join(member())
            with trainer(server) as t:
                await asyncio.to_thread(own_run, t)
            granted = await s.ask_tickets(2)
            assert granted.state.members[0].state == "serving"
            results = await asyncio.gather(*(s.put_group(x, sent[x.index]) for x in granted.tickets))
            assert all(r.held for r in results)

    asyncio.run(sample())
    with trainer(server, epoch=1) as t:
        batch = t.take(1, 0, 2, deadline_s=5)
        headers = [h for g in batch.groups for h in g.headers]
        found = t.fetch(1, headers)
        for index, trajectories in sent.items():
            for sample_number, one in enumerate(trajectories):
                arrays = found[f"{index}.0.{sample_number}"]
                assert arrays.keys() == arrays_of(one).keys()
                for field, array in arrays_of(one).items():
                    np.testing.assert_array_equal(arrays[field], array)
        some = t.fetch(1, headers[:1], ["routing.experts", "teacher_logprobs"])
        assert {k: list(v) for k, v in some.items()} == {"0.0.0": ["routing.experts"]}
        assert t.consumed(1).cursor == m.Cursor(watermark=2)


def test_a_large_batch_is_fetched_in_pieces(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_asyncrl.buffer.client.FETCH_BYTES", 1000)
    ask = begun(server.service)
    ask.sender = "rollout-0"
    for ticket in ask(m.AskTickets, wanted=2, holding=()).tickets:
        ask.put(ticket)
    with trainer(server, epoch=1) as t:
        batch = t.take(1, 0, 2, deadline_s=5)
        found = t.fetch(1, [h for g in batch.groups for h in g.headers])
    assert sorted(found) == ["0.0.0", "0.0.1", "1.0.0", "1.0.1"]
    np.testing.assert_array_equal(found["1.0.1"]["tokens"], group(1)[1].tokens)


def test_an_older_trainer_learns_that_it_is_not_the_owner(server: Running) -> None:
    with trainer(server) as first, trainer(server) as second:
        own_run(first)
        second.acquire_lease()
        assert (first.epoch, second.epoch) == (1, 2)
        calls: list[Callable[[], Any]] = [
            first.state, lambda: first.take(1, 0, 2, deadline_s=5), lambda: first.consumed(1),
            lambda: first.commit(1, [], []), lambda: first.set_phase("finished"), lambda: first.fetch(1, []),
            lambda: first.begin(0, m.Cursor(), m.Counters()),
        ]  # fmt: skip
        for call in calls[:5] + calls[6:]:
            with pytest.raises(StaleEpoch, match="lease 1 is over"):
                call()
        assert second.state().phase == "starting"


def test_work_for_a_lease_that_is_over_is_stale_for_the_sampler(server: Running) -> None:
    async def sample() -> None:
        async with sampler(server) as s:
            begun(server.service, holder="a")
            (ticket,) = (await s.ask_tickets(1)).tickets
            (other,) = (await s.ask_tickets(1)).tickets
            begun(server.service, holder="b")
            with pytest.raises(StaleEpoch):
                await s.put_group(ticket, group(ticket.index))
            with pytest.raises(StaleEpoch):
                await s.return_ticket(other, "failed", "no matter", 1)
            (new,) = (await s.ask_tickets(1)).tickets
            assert (await s.put_group(new, group(new.index))).held

    asyncio.run(sample())


# ---- waiting


def test_a_wait_for_a_batch_says_what_is_missing(server: Running) -> None:
    with trainer(server) as t:
        own_run(t)
        with pytest.raises(DeadlineExceeded, match=r"trainer-0 waited 0\.2 s for 2 groups for step 1: 0 are held"):
            t.take(1, 0, 2, deadline_s=0.2)
        t.set_phase("failed", "the last engine died")
        with pytest.raises(UserError, match="the last engine died"):
            t.take(1, 0, 2, deadline_s=5)


def test_a_buffer_that_does_not_answer_is_named() -> None:
    dead = fixed(Endpoint(address="tcp://127.0.0.1:9", public_key=None))
    with (
        BufferClient(dead, None, sender="trainer-1", deadline_s=0.3, resend_s=0.1) as t,
        pytest.raises(DeadlineExceeded, match=r"trainer-1 waited 0\.3 s for the buffer at tcp://127\.0\.0\.1:9 .*Get"),
    ):
        t.state()

    async def ask() -> None:
        async with AsyncBufferClient(dead, None, sender="rollout-0", deadline_s=0.3, resend_s=0.1) as s:
            with pytest.raises(DeadlineExceeded, match=r"rollout-0 waited .* AskTickets"):
                await s.ask_tickets(1)

    asyncio.run(ask())


def test_a_buffer_that_never_starts_is_named(tmp_path: Path) -> None:
    from moe_asyncrl.telemetry.run_folder import RunFolder

    with pytest.raises(DeadlineExceeded, match="trainer-0: the buffer did not say where it listens"):
        BufferClient.connect(RunFolder(tmp_path), sender="trainer-0", start_s=0.2)
    with pytest.raises(DeadlineExceeded, match="rollout-0: the buffer did not say where it listens"):
        asyncio.run(AsyncBufferClient.connect(RunFolder(tmp_path), sender="rollout-0", start_s=0.2))


def test_refusals_carry_their_code(server: Running) -> None:
    with trainer(server) as t:
        own_run(t)
        with pytest.raises(RequestRefused, match="the buffer refused: step 3 was not taken") as caught:
            t.consumed(3)
        assert caught.value.code == "bad_request"


# ---- answers that get lost


class Forgetful(BufferService):
    """Does what is asked and loses the first answer to each request that it is told to lose."""

    lose: frozenset[str] = frozenset()
    handled: list[str]

    def handle(self, request: Any, frames: Any, now: float) -> Any:
        self.handled = [*getattr(self, "handled", []), type(request).__name__]
        reply, out = super().handle(request, frames, now)
        if type(request).__name__ in self.lose:
            self.lose -= {type(request).__name__}
            return msgspec.structs.replace(reply, request=-1), ()
        return reply, out


def test_every_request_may_be_sent_again_without_harm() -> None:
    to = Forgetful(service().limits)
    kinds = frozenset(k.__name__ for k in get_args(m.AnyRequest)) - {"GetState"}
    to.lose = kinds
    with running(to) as server:

        async def sample() -> None:
            async with sampler(server, resend_s=0.1) as s:
                await s.join(member())
                with trainer(server, resend_s=0.1) as t:
                    await asyncio.to_thread(own_run, t)
                granted = (await s.ask_tickets(4)).tickets
                assert [x.index for x in granted] == [0, 1, 2, 3]
                for ticket in granted[:3]:
                    assert (await s.put_group(ticket, group(ticket.index))).held
                await s.return_ticket(granted[3], "filtered", "all rewards are equal", 2)
                more = (await s.ask_tickets(2)).tickets
                assert [(x.index, x.attempt) for x in more] == [(3, 1), (4, 0)]
                await s.leave(member().id, "stopped")

        asyncio.run(sample())
        with trainer(server, epoch=1, resend_s=0.1) as t:
            batch = t.take(1, 0, 2, deadline_s=20)
            assert [g.ticket.index for g in batch.groups] == [0, 1]
            headers = [h for g in batch.groups for h in g.headers]
            found = t.fetch(1, headers)
            assert len(found["0.0.0"]) == 5
            needs = {"0.0.0": np.arange(1, 5)}
            (rows,) = t.fetch_rows(1, headers, needs, [1], {"0.0.0": found["0.0.0"]["tokens"]}).values()
            np.testing.assert_array_equal(rows.experts, found["0.0.0"]["routing.experts"][1:5, 1:])
            result = t.consumed(1)
            t.set_phase("finishing")
    assert to.lose == frozenset()
    assert {k for k in kinds if to.handled.count(k) >= 2} == kinds
    assert result.counters == m.Counters(sampled=8, trained=4, filtered=2)
    assert result.cursor == m.Cursor(watermark=2)
    assert to.state.epoch == 1


def test_clients_find_a_buffer_that_came_back_at_another_address() -> None:
    with running() as server:
        before = server.endpoint
        with trainer(server, resend_s=0.2) as t:
            assert t.state().epoch == 0
            server.stop()
            starting = threading.Timer(0.5, server.start)
            starting.start()
            assert t.acquire_lease() == 1
            starting.join()
        assert server.endpoint != before

        async def ask() -> None:
            async with sampler(server, resend_s=0.2) as s:
                await s.state()
                await asyncio.to_thread(server.stop)
                asking = asyncio.gather(*(s.state() for _ in range(5)))
                await asyncio.sleep(0.5)
                await asyncio.to_thread(server.start)
                assert {x.epoch for x in await asking} == {1}

        asyncio.run(ask())


# ---- bad messages


def raw(server: Running, keys: Any = CLIENT_KEYS, endpoint: Endpoint | None = None) -> zmq.Socket[bytes]:
    found = endpoint or server.endpoint
    assert found is not None
    return connect(zmq.Context.instance().socket(zmq.DEALER), found, keys)


BAD: dict[str, list[bytes]] = {
    "garbage": [b"\xc1\xff\x00garbage"],
    "empty": [b""],
    "not a map": [msgspec.msgpack.encode([1, 2])],
    "unknown tag": [msgspec.msgpack.encode({"type": "Exec", "request": 5, "sender": "x", "epoch": 0})],
    "missing field": [msgspec.msgpack.encode({"type": "Take", "request": 5, "sender": "x", "epoch": 0})],
    "text that is none": [msgspec.msgpack.encode({"type": "GetState", "epoch": 0, "request": 5}) + b"\xa1\xff"],
    "frames that do not belong": [encode(GET), b"frame"],
    "thousands of frames": [encode(GET), *[b""] * 5_000],
    "deeply nested": [b"\x91" * 100_000],
}


@pytest.mark.parametrize("parts", BAD.values(), ids=BAD.keys())
def test_a_bad_message_is_refused_and_the_next_one_answered(server: Running, parts: list[bytes]) -> None:
    s = raw(server)
    s.send_multipart(parts)
    assert s.poll(10_000)
    reply = decode_reply(s.recv_multipart()[0])
    assert isinstance(reply, m.Refused)
    assert reply.code == "bad_request"
    s.send(encode(GET))
    assert s.poll(10_000)
    assert isinstance(decode_reply(s.recv()), m.RunState)
    s.close()


def test_a_message_that_is_too_large_cuts_its_sender_off_and_nobody_else() -> None:
    with running(max_part=100_000) as server, trainer(server) as t:
        t.state()
        s = raw(server)
        s.send_multipart([encode(GET), bytes(200_000)])
        assert not s.poll(500)
        assert t.state().epoch == 0
        s.close()


def test_a_header_that_promises_the_moon_is_refused(server: Running) -> None:
    """Sizes come from the frames that are here, never from what a header says."""
    ask = begun(server.service)
    (ticket,) = ask(m.AskTickets, wanted=1, holding=()).tickets
    with trainer(server, epoch=1) as t:
        from tests.buffer.harness import packed

        headers, frames = packed(group(ticket.index))
        first = headers[0]
        huge = msgspec.structs.replace(first.frames[0], shape=(2**62, 2**62))
        lying = msgspec.structs.replace(first, frames=(huge, *first.frames[1:]))
        request = m.PutGroup(epoch=1, sender="x", request=77, ticket=ticket, headers=(lying, *headers[1:]), failed=0)
        reply, _ = t._exchange(request, frames)
        assert isinstance(reply, m.Refused)
        assert "frame 'tokens' has the shape" in reply.reason
        assert t.state().held == 0


# ---- keys


@pytest.mark.parametrize("keys", ["unknown", "none"])
def test_without_the_runs_keys_no_message_is_read(server: Running, keys: str) -> None:
    assert server.endpoint is not None
    if keys == "unknown":
        stranger = raw(server, new_pair())
    else:
        stranger = raw(server, None, Endpoint(address=server.endpoint.address, public_key=None))
    for _ in range(3):
        stranger.send(encode(GET))
    assert not stranger.poll(700)
    stranger.close()
    with trainer(server) as t:
        assert t.state().epoch == 0


def test_a_client_with_other_keys_is_told_what_to_look_at(server: Running) -> None:
    with (
        BufferClient(server.find, new_pair(), sender="trainer-0", deadline_s=0.5) as t,
        pytest.raises(DeadlineExceeded, match="are these the run's keys"),
    ):
        t.state()


def test_a_buffer_that_poses_as_ours_gets_no_message(server: Running) -> None:
    """Clients check the buffer's key too."""
    assert server.endpoint is not None
    posing = Endpoint(address=server.endpoint.address, public_key=new_pair().public)
    with (
        BufferClient(fixed(posing), CLIENT_KEYS, sender="trainer-0", deadline_s=0.5) as t,
        pytest.raises(DeadlineExceeded),
    ):
        t.state()


def test_a_buffer_on_tcp_without_keys_does_not_start() -> None:
    with pytest.raises(ValueError, match="needs keys"):
        BufferServer(service(), address="tcp://127.0.0.1:*")


def test_keys_are_made_once_and_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = ensure_keys(folder)
    assert ensure_keys(folder) == made
    assert client_keys(folder) == made[1]
    assert made[0] != made[1]
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    assert made[0].secret not in repr(made[0])


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"public": "a", "secret": "b"}'])
def test_keys_that_are_not_whole_are_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "client.json").write_bytes(content)
    with pytest.raises(UserError, match=r"client\.json"):
        client_keys(tmp_path)


# ---- memory


def test_a_client_that_vanishes_in_the_middle_of_its_group_leaves_nothing_behind(server: Running) -> None:
    ask = begun(server.service)
    assert len(ask(m.AskTickets, wanted=1, holding=()).tickets) == 1
    s = raw(server)
    s.send(encode(GET), zmq.SNDMORE)
    s.send(bytes(1000), zmq.SNDMORE)
    s.close(linger=0)
    time.sleep(0.1)
    with trainer(server, epoch=1) as t:
        assert t.state().held == 0
    assert server.service.bytes_held == 0
