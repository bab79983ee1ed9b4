"""A run without a trainer: the real buffer in this process, a real engine, and the trainer's messages sent by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

from moe_asyncrl.buffer.aio import AsyncBufferClient
from moe_asyncrl.buffer.endpoint import write_endpoint
from moe_asyncrl.buffer.ledger import Limits
from moe_asyncrl.buffer.requests import Requests
from moe_asyncrl.buffer.server import BufferServer
from moe_asyncrl.buffer.service import BufferService
from moe_asyncrl.config.load import parse_recipe
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.group_wire import decode_group
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.models.tiny_tokenizer import write_tokenizer
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.engines.fixtures import TestEngine


def model_folder(engine_model: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The engine's configuration with a byte-level tokenizer: what a rollout reads of a model."""
    path = folder / "model"
    path.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (engine_model / name).exists():
            shutil.copy(engine_model / name, path / name)
    write_tokenizer(path, "bytes", 1024)
    return path


def write_jsonl(path: pathlib.Path, lines: Sequence[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe_for(model: pathlib.Path, train: pathlib.Path, **sections: dict[str, Any]) -> Recipe:
    """A small recipe; `sections` change single fields."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "max_context": 256},
        "data": {"train": str(train)},
        "engine": {"start_timeout_s": 20, "request_timeout_s": 60},
        "weights": {"timeout_s": 10},
        "rollout": {
            "groups_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 8,
            "concurrent_groups": 8,
            "groups_per_request": 4,
        },
        "reward": {"function": "exact"},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return parse_recipe(base)


class HandRun:
    """The buffer's service with what a trainer and an engine say to it."""

    def __init__(self, folder: RunFolder, recipe: Recipe, service: BufferService) -> None:
        self.folder, self.recipe, self.service = folder, recipe, service
        self._trainer, self._engine = Requests("trainer-0"), Requests("engine-0")
        self._members: list[m.Member] = []
        lease = self._say(self._trainer.acquire("test"))
        assert isinstance(lease, m.Lease)
        self._trainer.epoch = lease.lease

    def _say(self, request: m.AnyRequest) -> m.AnyReply:
        import time

        reply, _ = self.service.handle(request, (), time.time())
        assert not isinstance(reply, m.Refused), reply
        return reply

    def begin(self, step: int = 0) -> None:
        self._say(self._trainer.begin(step, m.Cursor(watermark=0), m.Counters()))

    def join(self, engine: TestEngine | str, name: str = "engine-0") -> None:
        url = engine if isinstance(engine, str) else engine.url
        member = m.Member(name=name, url=url, incarnation=1, world_size=1, state="joining", version=-1, heartbeat=0.0)
        self._members.append(member)
        self._say(self._engine.join(member))

    def commit(self, version: int) -> None:
        lives = [m.MemberId(name=x.name, incarnation=x.incarnation) for x in self._members]
        self._say(self._trainer.commit(version, lives, ()))

    def phase(self, phase: m.Phase) -> None:
        self._say(self._trainer.set_phase(phase, None, self._trainer.epoch))

    def state(self) -> m.RunState:
        return self.service.run_state()

    def take(self, step: int, version: int) -> list[list[Trajectory]] | None:
        """The batch of a step, decoded whole, and consumed at once; None if it is not there yet."""
        reply = self._say(self._trainer.take(step, version, self.recipe.rollout.groups_per_step))
        if not isinstance(reply, m.Batch):
            return None
        groups = []
        for held in reply.groups:
            group = self.service._groups[held.ticket.index]
            frames = [group.frames[h.identity.trajectory, s.field] for h in held.headers for s in h.frames]
            groups.append(list(decode_group(held.headers, frames)))
        self._say(self._trainer.consumed(step))
        return groups

    async def wait_take(self, step: int, version: int, deadline_s: float = 60.0) -> list[list[Trajectory]]:
        async with asyncio.timeout(deadline_s):
            while (groups := self.take(step, version)) is None:
                await asyncio.sleep(0.05)
        return groups

    async def until(self, what: str, deadline_s: float = 60.0, **least: int) -> m.RunState:
        """Wait until the counters (or held, issued) have reached the given values."""
        end = asyncio.get_running_loop().time() + deadline_s
        while True:
            state = self.state()
            have = {k: getattr(state, k, getattr(state.counters, k, None)) for k in least}
            if all((have[k] or 0) >= v for k, v in least.items()):
                return state
            assert asyncio.get_running_loop().time() < end, f"waited for {what}: {have}"
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def hand_run(folder: pathlib.Path, recipe: Recipe) -> AsyncIterator[HandRun]:
    """The buffer serves while the block runs."""
    run = RunFolder(folder / "run")
    run.path.mkdir(exist_ok=True)
    limits = Limits(
        groups_per_step=recipe.rollout.groups_per_step,
        max_staleness=recipe.buffer.max_staleness,
        max_attempts=recipe.buffer.max_attempts,
        capacity=1000,
    )
    service = BufferService(limits)
    with tempfile.TemporaryDirectory() as short:  # a Unix socket's path has at most 107 bytes
        server = BufferServer(service, address=f"ipc://{short}/buffer")
        write_endpoint(run, server.bind())
        serving = asyncio.create_task(server.serve())
        try:
            yield HandRun(run, recipe, service)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            server.close()


async def client(run: HandRun, name: str = "rollout-0") -> AsyncBufferClient:
    return await AsyncBufferClient.connect(run.folder, sender=name)
