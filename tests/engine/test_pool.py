"""The pool: who gets what, and what happens when an engine fails. Real engines, and replies that no engine gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import pytest
from aiohttp import web

from moe_asyncrl.data.errors import EngineLost
from moe_asyncrl.data.messages import Member
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import GenerateRequest
from moe_asyncrl.engine.errors import EngineRefused, EngineTimeout, EngineUnreachable, MalformedReply, NoEngines
from moe_asyncrl.engine.pool import EnginePool
from moe_asyncrl.engine.ports import free_port
from tests.engine.test_server import group_members, wait_until_gone
from tests.engines.fixtures import TestEngine

COUNTER = itertools.count()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def group(n: int = 4, tokens: int = 6, prompt: int = 10) -> list[GenerateRequest]:
    first = next(COUNTER)
    return [
        GenerateRequest(
            rid=f"pool-{first}-{i}",
            input_ids=list(range(5 + first % 300, 5 + first % 300 + prompt)),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens),
            version=99,
            ignore_eos=True,
        )
        for i in range(n)
    ]


def member(name: str, url: str, **fields: object) -> Member:
    values = {
        "name": name,
        "url": url,
        "incarnation": 0,
        "world_size": 1,
        "state": "serving",
        "version": -1,
        "heartbeat": 0.0,
        **fields,
    }
    return Member(**{k: v for k, v in values.items() if k in Member.__struct_fields__})  # type: ignore[arg-type]


def make_client(m: Member) -> EngineClient:
    return EngineClient(m.url, name=m.name)


@contextlib.asynccontextmanager
async def imitation(**handlers: Handler) -> AsyncIterator[str]:
    """An HTTP server for replies that a real engine cannot be made to give. Keys are paths without the slash."""
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_route("*", f"/{path}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def alive(request: web.Request) -> web.StreamResponse:
    return web.json_response({"model_path": "m", "weight_version": "4"})


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.json_response([{"output_ids": [1], "meta_info": {"id": "x"}}])


def test_groups_go_to_the_engine_with_least_to_do(engine: Callable[..., TestEngine]) -> None:
    one, two = engine(), engine(index=1)

    async def go() -> None:
        async with EnginePool(make_client) as pool:
            pool.set_members([member("a", one.url), member("b", two.url)])
            groups = [group(tokens=n) for n in (200, 20, 20, 20)]
            tasks = []
            for g in groups:
                tasks.append(asyncio.create_task(pool.generate(g, deadline_s=120)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            load = {s.member.name: (s.outstanding_requests, s.outstanding_tokens) for s in pool.status()}
            assert load == {"a": (4, 4 * 210), "b": (12, 12 * 30)}
            done = await asyncio.gather(*tasks)
            assert [{c.engine for c in d} for d in done] == [{"a"}, {"b"}, {"b"}, {"b"}]
            # The group's prompt went out under the engine's version, whatever the caller thought.
            assert {c.asked_version for d in done for c in d} == {-1}
            assert all(s.outstanding_tokens == s.outstanding_requests == 0 for s in pool.status())

    asyncio.run(go())


def test_a_killed_engine_is_taken_out_and_its_group_finishes_elsewhere(engine: Callable[..., TestEngine]) -> None:
    one, two = engine(), engine(index=1)
    scheduler = next(
        pid for pid in group_members(two.server.pid) if "scheduler" in " ".join(psutil.Process(pid).cmdline())
    )

    async def go() -> None:
        async with EnginePool(make_client, probe_period_s=0.5) as pool:
            pool.set_members([member("a", two.url)])
            doomed = asyncio.create_task(pool.generate(group(tokens=900), deadline_s=120))
            anywhere = asyncio.create_task(pool.generate_anywhere(g := group(tokens=900), deadline_s=120))
            await asyncio.sleep(0.5)
            assert not doomed.done() and not anywhere.done()
            pool.set_members([member("a", two.url), member("b", one.url)])
            os.kill(scheduler, signal.SIGKILL)
            with pytest.raises(EngineLost, match=r"^a"):
                await doomed
            done = await anywhere
            assert [c.rid for c in done] == [r.rid for r in g] and {c.engine for c in done} == {"b"}
            assert [s.health for s in pool.status()] == ["out", "healthy"]
            pool.set_members([member("a", two.url)])
            with pytest.raises(NoEngines, match=r"no engine is left.*a "):
                await pool.generate(group(), deadline_s=5)
            started = time.monotonic()
            with pytest.raises(NoEngines, match=r"waited 0\.4 s"):
                await pool.generate(group(), deadline_s=5, wait_s=0.4)
            assert time.monotonic() - started >= 0.4

    asyncio.run(go())
    wait_until_gone(two.server.pid)
    assert two.server.exit_status() is not None


def test_an_engine_that_was_taken_out_comes_back_after_a_probe(engine: Callable[..., TestEngine]) -> None:
    one = engine()

    async def go() -> None:
        async with EnginePool(make_client, probe_period_s=0.2) as pool:
            pool.set_members([member("a", one.url)])
            running = asyncio.create_task(pool.generate(group(tokens=900), deadline_s=120))
            await asyncio.sleep(0.3)
            pool.take_out("a", "its update failed")
            with pytest.raises(EngineLost, match="a was taken out of the pool: its update failed"):
                await running
            done = await pool.generate(group(), deadline_s=60, wait_s=30)
            assert len(done) == 4
            # With other weights than the run thinks it has, it stays out.
            pool.set_members([member("a", one.url, version=5)])
            pool.take_out("a", "stale")
            with pytest.raises(NoEngines, match="a stale"):
                await pool.generate(group(), deadline_s=60, wait_s=1.0)

    asyncio.run(go())


def test_only_members_that_serve_are_used() -> None:
    async def go() -> None:
        async with EnginePool(make_client) as pool:
            with pytest.raises(NoEngines, match="the run has none"):
                await pool.generate(group(), deadline_s=1)
            url = "http://127.0.0.1:1"
            pool.set_members([member("a", url, state="joining"), member("b", url, state="quarantined")])
            with pytest.raises(NoEngines, match="a joining; b quarantined"):
                await pool.generate(group(), deadline_s=1)

    asyncio.run(go())


def test_a_new_life_of_an_engine_loses_the_old_ones_requests() -> None:
    async def go() -> None:
        async with imitation(generate=silent) as url, EnginePool(make_client) as pool:
            pool.set_members([member("a", url)])
            running = asyncio.create_task(pool.generate(group(), deadline_s=30))
            await asyncio.sleep(0.1)
            pool.set_members([member("a", url, incarnation=1)])
            with pytest.raises(EngineLost, match="started anew"):
                await running
            (status,) = pool.status()
            assert status.health == "healthy" and status.outstanding_requests == 0

    asyncio.run(go())


def test_a_slow_engine_stays_and_a_silent_one_goes() -> None:
    async def go() -> None:
        async with (
            imitation(generate=silent, server_info=alive) as slow,
            imitation(generate=silent, server_info=silent) as dead,
            EnginePool(make_client, probe_deadline_s=0.3) as pool,
        ):
            for url, health in ((slow, "healthy"), (dead, "out")):
                pool.set_members([member(health, url)])
                with pytest.raises(EngineTimeout, match=rf"{health}: waited 0\.2 s for 4 completions"):
                    await pool.generate(group(), deadline_s=0.2)
                assert [s.health for s in pool.status()] == [health]

    asyncio.run(go())


def test_a_malformed_reply_is_named_and_not_retried() -> None:
    calls = itertools.count()

    async def counted(request: web.Request) -> web.StreamResponse:
        next(calls)
        return await garbage(request)

    async def go() -> None:
        async with imitation(generate=counted) as url, EnginePool(make_client) as pool:
            pool.set_members([member("a", url)])
            with pytest.raises(MalformedReply, match=r"a: the reply to /generate"):
                await pool.generate_anywhere(group(), deadline_s=5)

    asyncio.run(go())
    assert next(calls) == 1


def test_what_an_engine_without_whole_weights_is_asked_goes_to_another() -> None:
    calls = itertools.count()

    async def unwell(request: web.Request) -> web.StreamResponse:
        next(calls)
        return web.json_response({"error": {"message": "this engine's weights are not whole: cut"}}, status=503)

    async def go() -> None:
        async with imitation(generate=unwell) as url, EnginePool(make_client) as pool:
            pool.set_members([member("a", url), member("b", url)])
            with pytest.raises(NoEngines, match=r"a a: cannot serve .*not whole: cut; b b: cannot serve"):
                await pool.generate_anywhere(group(), deadline_s=5)

    asyncio.run(go())
    assert next(calls) == 2


def test_retries_end() -> None:
    async def go() -> None:
        async with EnginePool(make_client) as pool:
            dead = [member(name, f"http://127.0.0.1:{free_port()}") for name in "abcd"]
            pool.set_members(dead)
            with pytest.raises(EngineUnreachable, match=r"c: .*cannot be reached"):
                await pool.generate_anywhere(group(), deadline_s=5, attempts=3)
            assert [s.health for s in pool.status()] == ["out", "out", "out", "healthy"]

    asyncio.run(go())


def test_a_connection_that_the_engine_closes_when_idle_does_not_look_like_a_dead_engine() -> None:
    async def go() -> None:
        async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            body = b'{"model_path": "m", "weight_version": "4"}'
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: keep-alive\r\n\r\n" % len(body) + body)
            await writer.drain()
            # The moment of closing: the next request on this connection gets no answer.
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, EngineClient(f"http://127.0.0.1:{port}") as client:
            for _ in range(3):
                assert await client.serving_version(deadline_s=5) == 4

    asyncio.run(go())


def test_control_calls_name_the_engine_and_the_wait() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"success": False, "message": "no session is open"}, status=400)

    async def says_no(request: web.Request) -> web.StreamResponse:
        return web.json_response({"success": False, "message": "it did not work"})

    async def go() -> None:
        handlers = {
            "update_weight_version": refuse,
            "destroy_weights_update_group": says_no,
            "pause_generation": silent,
        }
        async with imitation(**handlers, model_info=garbage) as url, EngineClient(url, name="engine-4") as client:
            with pytest.raises(EngineRefused, match=r"^engine-4: naming of version 3.*no session is open"):
                await client.set_version(3, deadline_s=5)
            with pytest.raises(EngineRefused, match=r"^engine-4: leaving update group g failed: it did not work"):
                await client.leave_group(group="g", deadline_s=5)
            with pytest.raises(EngineTimeout, match=r"^engine-4: waited 0\.2 s for pause \(in_place\)"):
                await client.pause(mode="in_place", deadline_s=0.2)
            with pytest.raises(MalformedReply, match=r"^engine-4: the reply to /model_info"):
                await client.serving_version(deadline_s=5)

    asyncio.run(go())
