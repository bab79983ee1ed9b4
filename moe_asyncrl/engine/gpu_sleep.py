"""A colocated engine's turn on a GPU as a small check, run by `moe_asyncrl.cluster.gpu_check`.

The same code runs with a CPU engine, whose memory stays where it is.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

from moe_asyncrl.config.capability import Capabilities
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.engine.gpu_paths import CALL_S, STALE_FACTOR, START_S, check, client_of, difference, start, tolerance
from moe_asyncrl.engine.server import Server
from moe_asyncrl.models.gpu_reference import save_tiny_model
from moe_asyncrl.models.spec import ModelSpec

MIB = 2**20
CACHE_TOKENS = 1 << 18
LEAST_MIB = 64
"""The cache of that many tokens takes more; so much must at least come back to the device."""


def sleep(capabilities: Capabilities) -> str:
    """An idle engine gives its memory back, gets it again, and answers as the model that it was then given."""

    def free_mib() -> float:
        return float(torch.cuda.mem_get_info()[0]) / MIB if capabilities.cuda else 0.0

    async def run(server: Server, new: Path, spec: ModelSpec) -> tuple[float, float]:
        async with client_of(server, spec) as client:
            before = free_mib()
            await client.pause(mode="retract", deadline_s=CALL_S)
            await client.sleep(epoch=0, deadline_s=CALL_S)
            freed = free_mib() - before
            await client.wake("weights", epoch=0, deadline_s=CALL_S)
            await client.load_weights(str(new), 1, flush=False, deadline_s=CALL_S)
            await client.wake("cache", epoch=0, deadline_s=CALL_S)
            await client.resume(deadline_s=CALL_S)
            stale, found = await difference(client, models, 1)
            if stale < STALE_FACTOR * tolerance(capabilities):
                raise UserError(f"old and new weights answer alike ({stale:.2e}), so the check shows nothing")
            return freed, found

    with tempfile.TemporaryDirectory() as name:
        old, new = Path(name) / "old", Path(name) / "new"
        models = [save_tiny_model(old, seed=0), save_tiny_model(new, seed=1)]
        tokens = CACHE_TOKENS if capabilities.cuda else 4096
        with start(capabilities, old, gpu=0, colocated=True, max_total_tokens=tokens) as server:
            server.wait_ready(START_S)
            freed, found = asyncio.run(run(server, new, ModelSpec.from_hf(new)))
    if capabilities.cuda and freed < LEAST_MIB:
        raise UserError(f"the sleeping engine gave {freed:.0f} MiB back, expected at least {LEAST_MIB}")
    return f"{freed:.0f} MiB given back; " + check(found, capabilities, "engine after its sleep against the new model")
