"""`moe-asyncrl role engine`: joins the engine's lives to the recipe, the run folder and the buffer's process."""

from __future__ import annotations

import asyncio
import signal

from moe_asyncrl.buffer.aio import AsyncBufferClient
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.engine.arguments import engine_args, interpreter
from moe_asyncrl.engine.command import EngineArgs
from moe_asyncrl.engine.keys import ensure_engine_key
from moe_asyncrl.engine.machine import EngineMachine, look_at_machine
from moe_asyncrl.engine.role import EngineRole, Lives
from moe_asyncrl.engine.server import Server
from moe_asyncrl.telemetry.run_folder import RunFolder


def run(folder: RunFolder, recipe: Recipe, index: int) -> int:
    """Serve engine `index` of the run until the run is over. Returns 0 then, and after SIGTERM or SIGINT."""
    machine = look_at_machine(interpreter(recipe))
    args = engine_args(recipe, index, cpu=not machine.cuda, api_key=ensure_engine_key(folder.keys))
    asyncio.run(_run(folder, recipe, f"engine-{index}", args, machine))
    return 0


async def _run(folder: RunFolder, recipe: Recipe, name: str, args: EngineArgs, machine: EngineMachine) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def start() -> Server:
        return Server.start(args, cpu=not machine.cuda, log_path=folder.log_path(f"{name}-sglang"), name=name)

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
