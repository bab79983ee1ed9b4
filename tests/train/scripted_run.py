"""A run folder with the real buffer on a thread, and a sampler that answers every credit with a made-up group."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moe_asyncrl.buffer.client import BufferClient
from moe_asyncrl.buffer.endpoint import write_endpoint
from moe_asyncrl.buffer.role import limits_of
from moe_asyncrl.buffer.server import BufferServer
from moe_asyncrl.buffer.service import BufferService
from moe_asyncrl.config.load import dump_recipe
from moe_asyncrl.config.recipe import Data, Model, Recipe
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.wire import encode
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.run_folder import RunFolder
from tests.data.samples import group

Change = Callable[[Trajectory], Trajectory]


def make_run(path: Path, model: Path, **sections: msgspec.Struct) -> tuple[RunFolder, Recipe]:
    """A run folder with its recipe, and a small prompt file."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True, exist_ok=True)
    prompts = folder.path / "train.jsonl"
    lines = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe(model=Model(path=str(model), max_context=64), data=Data(train=str(prompts)), **sections)  # type: ignore[arg-type]
    folder.recipe.write_text(dump_recipe(recipe))
    return folder, recipe


@contextlib.contextmanager
def serving(
    folder: RunFolder, recipe: Recipe, spec: ModelSpec, *, change: Change = lambda t: t
) -> Iterator[BufferService]:
    """The buffer of the run and its sampler, until the block ends. `change` alters every trajectory that is sent."""
    service = BufferService(limits_of(recipe))
    ready, done = threading.Event(), threading.Event()
    running: dict[str, Any] = {}

    async def main() -> None:
        server = BufferServer(service, address=f"ipc://{folder.path}/buffer.sock")
        write_endpoint(folder, server.bind())
        running["loop"], running["task"] = asyncio.get_running_loop(), asyncio.create_task(server.serve())
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await running["task"]
        server.close()

    buffer = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    buffer.start()
    assert ready.wait(10)
    sampler = threading.Thread(target=_sample, args=(folder, recipe, spec, change, done), daemon=True)
    sampler.start()
    try:
        yield service
    finally:
        done.set()
        sampler.join(20)
        running["loop"].call_soon_threadsafe(running["task"].cancel)
        buffer.join(10)
        assert not sampler.is_alive() and not buffer.is_alive()


def _sample(folder: RunFolder, recipe: Recipe, spec: ModelSpec, change: Change, done: threading.Event) -> None:
    """Grant after grant until `done`: what a group holds depends on its index alone."""
    with BufferClient.connect(folder, sender="rollout-0", deadline_s=10) as client:
        while not done.wait(0.01):
            reply = client._ask(client._requests.ask_tickets(recipe.rollout.groups_per_step, ()))
            if not isinstance(reply, m.Tickets):
                continue
            for ticket in reply.tickets:
                made = [change(fit(t, spec)) for t in samples_of(ticket, recipe, reply.state.version)]
                parts = [encode(t) for t in made]
                request = client._requests.put_group(ticket, [h for h, _ in parts])
                client._exchange(request, [f for _, frames in parts for f in frames])


def samples_of(ticket: m.Ticket, recipe: Recipe, version: int) -> list[Trajectory]:
    """The group of a credit, before it is fitted to a model."""
    length = 6 + ticket.index % 5
    return group(ticket.index, 0, size=recipe.rollout.group_size, version=version, tokens=length)


def fit(t: Trajectory, spec: ModelSpec) -> Trajectory:
    """The trajectory with tokens, experts and a reward that the model could have had."""
    draw = np.random.default_rng([t.identity.index, t.identity.sample, 1])
    order = draw.random((t.length - 1, spec.num_moe_layers, spec.num_experts)).argsort(-1)
    return dataclasses.replace(
        t,
        tokens=(t.tokens % spec.vocab_size).astype(np.int32),
        routing_experts=order[..., : spec.experts_per_token].astype(np.uint8),
        rewards={"total": float(draw.random())},
    )
