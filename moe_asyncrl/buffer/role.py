"""The buffer's process: listens, tells the run folder where, and serves until the run is over or it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from moe_asyncrl.buffer.endpoint import endpoint_file, write_endpoint
from moe_asyncrl.buffer.ledger import Limits
from moe_asyncrl.buffer.look import Look
from moe_asyncrl.buffer.recorder import Recorder
from moe_asyncrl.buffer.security import ensure_keys
from moe_asyncrl.buffer.server import BufferServer
from moe_asyncrl.buffer.service import BufferService, Timing
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.control.store import ControlStore
from moe_asyncrl.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""After the end of the run: how long nobody may ask anything before the process ends by itself."""


def limits_of(recipe: Recipe) -> Limits:
    """The buffer's bounds. Without `capacity_groups`, as many groups as the staleness bound lets be under way."""
    b, groups = recipe.buffer, recipe.rollout.groups_per_step
    capacity = b.capacity_groups if b.capacity_groups is not None else (b.max_staleness + 1) * groups
    return Limits(groups_per_step=groups, max_staleness=b.max_staleness, max_attempts=b.max_attempts, capacity=capacity)


def run(folder: RunFolder, recipe: Recipe, index: int = 0) -> int:
    """Serve the run in `folder`. Returns 0 when the run is over or after SIGTERM or SIGINT."""
    return asyncio.run(_run(folder, recipe, Timing()))


async def _run(folder: RunFolder, recipe: Recipe, timing: Timing, *, quiet_s: float = QUIET_S) -> int:
    own, clients = ensure_keys(folder.keys)
    store = ControlStore(folder.control_json)
    recorder = Recorder(
        folder.trajectories,
        groups_per_step=recipe.telemetry.record_groups_per_step,
        limit_bytes=recipe.telemetry.record_mib * 2**20,
    )
    service = BufferService(limits_of(recipe), timing=timing, state=store.load(), save=store.save, trained=recorder)
    server = BufferServer(
        service, address=f"tcp://{recipe.buffer.host}:*", keys=own, clients=frozenset({clients.public})
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving: asyncio.Task[None] | None = None
    look = Look(folder)
    try:
        endpoint = server.bind()
        write_endpoint(folder, endpoint)
        log.info("listening on %s, %s", endpoint.address, service.limits)
        serving = asyncio.create_task(server.serve())
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            await look.show(service.run_state())
            if serving.done():
                serving.result()
            if service.state.over and time.monotonic() - server.last_request > quiet_s:
                break
            await asyncio.wait([serving, stopping], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    finally:
        endpoint_file(folder).unlink(missing_ok=True)
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        server.close()
        await look.show(service.run_state())
        recorder.close()
    log.info("stopped: phase %s, %s", service.state.phase, service.ledger.counters)
    return 0
