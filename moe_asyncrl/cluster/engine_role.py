"""`moe-asyncrl role engine`: joins the engine's lives to the recipe, the run folder and the buffer's process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from moe_asyncrl.buffer.aio import AsyncBufferClient
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.engine.command import EngineArgs, spread_cores
from moe_asyncrl.engine.keys import ensure_engine_key
from moe_asyncrl.engine.machine import EngineMachine, look_at_machine
from moe_asyncrl.engine.role import EngineRole, Lives
from moe_asyncrl.engine.server import Server, free_port
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.run_folder import RunFolder


def run(folder: RunFolder, recipe: Recipe, index: int) -> int:
    """Serve engine `index` of the run until the run is over. Returns 0 then, and after SIGTERM or SIGINT."""
    python = recipe.engine.python or sys.executable
    machine = look_at_machine(python)
    args = engine_args(recipe, index, python, machine, ensure_engine_key(folder.keys))
    asyncio.run(_run(folder, recipe, f"engine-{index}", args, machine))
    return 0


def engine_args(recipe: Recipe, index: int, python: str, machine: EngineMachine, api_key: str | None) -> EngineArgs:
    """The server of engine `index`. Port 0 stands for one that is chosen when the server starts."""
    e = recipe.engine
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return EngineArgs(
        model=recipe.model.path,
        port=e.base_port + index if e.base_port else 0,
        python=python,
        host=e.host,
        dtype=e.dtype,
        tp=e.tp,
        ep=e.ep,
        moe=ModelSpec.from_hf(recipe.model.path).is_moe,
        context_length=recipe.model.max_context,
        max_running_requests=e.max_running_requests,
        max_total_tokens=e.max_total_tokens,
        # Engines with one seed would sample the same answers to the same prompt.
        random_seed=recipe.run.seed + index,
        api_key=api_key,
        cores=spread_cores(e.tp, index, cores) if e.tp > 1 and not machine.cuda else (),
        extra_args=e.extra_args,
    )


async def _run(folder: RunFolder, recipe: Recipe, name: str, args: EngineArgs, machine: EngineMachine) -> None:
    import msgspec

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def start() -> Server:
        port = args.port or free_port(args.host)
        chosen = msgspec.structs.replace(args, port=port)
        return Server.start(chosen, cpu=not machine.cuda, log_path=folder.log_path(f"{name}-sglang"), name=name)

    def note(span: str, began: float, ended: float) -> None:
        folder.events.append({"role": name, "span": span, "start": began, "end": ended})

    async with await AsyncBufferClient.connect(folder, sender=name, deadline_s=30.0) as buffer:
        role = EngineRole(
            name,
            buffer,
            start,
            lives=Lives(restarts=recipe.engine.restarts, start_s=recipe.engine.start_timeout_s),
            machine=machine,
            note=note,
        )
        await role.run(stop)
