"""Real SGLang servers that live as long as the test session.

`engine()` gives the default one (Qwen3-MoE); `engine(family=…, tp=…, ep=…, index=…)` others. A server takes some 20 s
to start and 1.7 GB, so it is started once and at most `MAX_ALIVE` live: the one used longest ago makes room.
A test that changes weights calls `reset` at its end (or uses the `fresh` fixture).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.command import EngineArgs, spread_cores
from moe_asyncrl.engine.completion import RoutingShape
from moe_asyncrl.engine.errors import EngineRefused
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.engine.server import Server
from tests.engines.models import Reference, make_model, routing_shape

MAX_ALIVE = 4
START_S = 240.0


@dataclasses.dataclass(frozen=True)
class Key:
    family: str
    tp: int
    ep: int
    index: int


@dataclasses.dataclass
class TestEngine:
    """A running server with its model and what transformers says about it."""

    __test__ = False
    server: Server
    model: pathlib.Path
    reference: Reference
    routing: RoutingShape | None

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def world_size(self) -> int:
        return self.server.args.tp

    def client(self) -> EngineClient:
        """A new client; use it with `async with` in one event loop."""
        return EngineClient(self.url, name=self.name, world_size=self.world_size, routing=self.routing)

    def reset(self) -> None:
        """The original weights again, under version -1, with no cached prefix and nothing paused."""

        async def go() -> None:
            async with self.client() as client:
                hold = await client.hold(deadline_s=20)
                if hold.update:
                    hold = await client.abandon(hold.update, reason="the test is over", deadline_s=20)
                if hold.reason:
                    await client.load_weights(str(self.model), -1, flush=False, deadline_s=60)
                await client.resume(deadline_s=20)
                await client.abort(None, deadline_s=20)
                for left in range(20, -1, -1):  # an abort is answered before the last request is gone
                    try:
                        await client.load_weights(str(self.model), -1, flush=True, deadline_s=60)
                        break
                    except EngineRefused:
                        if not left:
                            raise
                        await asyncio.sleep(0.2)

        asyncio.run(go())


class EngineHouse:
    """Starts servers on demand. Models are shared by all servers of a family."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._models: dict[str, tuple[pathlib.Path, Reference]] = {}
        self._alive: collections.OrderedDict[Key, TestEngine] = collections.OrderedDict()

    def model(self, family: str) -> tuple[pathlib.Path, Reference]:
        """The HF directory of a family's test model, and its reference."""
        if family not in self._models:
            path = make_model(family, self._folder / family)
            self._models[family] = (path, Reference(path))
        return self._models[family]

    def begin(self, key: Key) -> TestEngine:
        """Start the server if it does not run, without waiting for it."""
        known = self._alive.get(key)
        if known is not None:
            if known.server.exit_status() is None:
                self._alive.move_to_end(key)
                return known
            del self._alive[key]
        while len(self._alive) >= MAX_ALIVE:
            _, oldest = self._alive.popitem(last=False)
            oldest.server.stop()
        path, reference = self.model(key.family)
        name = f"{key.family}-tp{key.tp}-ep{key.ep}-{key.index}"
        routing = routing_shape(path)
        args = EngineArgs(
            model=str(path),
            port=free_port(),
            python=sys.executable,
            tp=key.tp,
            ep=key.ep,
            moe=routing is not None,
            max_running_requests=64,
            max_total_tokens=32768,
            cores=spread_cores(key.tp, key.index, tuple(sorted(os.sched_getaffinity(0)))) if key.tp > 1 else (),
        )
        server = Server.start(args, cpu=True, log_path=self._folder / f"{name}.log", name=name)
        self._alive[key] = TestEngine(server, path, reference, routing)
        return self._alive[key]

    def get(self, key: Key) -> TestEngine:
        """The running server."""
        found = self.begin(key)
        found.server.wait_ready(START_S)
        return found

    def end(self, key: Key) -> None:
        """End one server, if it runs."""
        found = self._alive.pop(key, None)
        if found is not None:
            found.server.stop()

    def stop(self) -> None:
        """End every server."""
        for found in self._alive.values():
            found.server.stop()
        self._alive.clear()


HOUSE = pytest.StashKey[EngineHouse]()
DEFAULT = Key("qwen3_moe", 1, 1, 0)


def _house(config: pytest.Config) -> EngineHouse:
    house = config.stash.get(HOUSE, None)
    if house is None:
        factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
        config.stash[HOUSE] = house = EngineHouse(factory.mktemp("engines"))
    return house


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the default server while the first tests run, if any test of this session will use one."""
    used = any("engine" in getattr(item, "fixturenames", ()) for item in session.items)
    if used and not session.config.option.collectonly:
        _house(session.config).begin(DEFAULT)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Also after an interrupt."""
    house = config.stash.get(HOUSE, None)
    if house is not None:
        house.stop()


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> EngineHouse:
    """The house of servers and test models."""
    return _house(request.config)


@pytest.fixture(scope="session")
def engine(engines: EngineHouse) -> Callable[..., TestEngine]:
    """`engine(family="qwen3_moe", tp=1, ep=1, index=0)` → a running server."""

    def get(family: str = "qwen3_moe", tp: int = 1, ep: int = 1, index: int = 0) -> TestEngine:
        return engines.get(Key(family, tp, ep, index))

    return get


@pytest.fixture
def fresh(engine: Callable[..., TestEngine]) -> Iterator[TestEngine]:
    """The default server, with its original weights before and after the test."""
    found = engine()
    found.reset()
    yield found
    found.reset()
