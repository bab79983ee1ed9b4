"""A late joiner gets its weights from an engine that serves, without the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from moe_asyncrl.data.weights import Prepare, Stream
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.errors import EngineRefused
from moe_asyncrl.engine.ports import free_port
from moe_asyncrl.weights.group import group_name

AT_ONCE = 4
"""Messages in one call: between calls both engines answer other questions, and the source generates."""
STEP_S = 30.0
"""The longest wait for one message."""


async def copy_weights(
    source: EngineClient,
    target: EngineClient,
    *,
    host: str,
    deadline_s: float,
    backend: str = "gloo",
    bucket_bytes: int = 64 << 20,
    depth: int = 2,
) -> None:
    """Bring `target` to what `source` serves. Both must have the same layout. `target` is paused meanwhile.

    Args:
        host: the source's machine, as the target reaches it; the ranks meet there at a free port.
        deadline_s: of each single call, in seconds.

    Raises:
        EngineRefused: one of them refused; a target that had its first byte is then broken and needs a full update.
        EngineLost: one of them is gone.
    """
    if source.world_size != target.world_size:
        raise EngineRefused(f"{target.name} has {target.world_size} ranks, {source.name} has {source.world_size}")
    copy = group_name(f"copy-{uuid.uuid4().hex[:12]}", min(STEP_S, deadline_s))
    try:
        await _meet(source, target, copy, host, backend, deadline_s)
        offer = await source.offer_copy(copy, group=copy, bucket_bytes=bucket_bytes, deadline_s=deadline_s)
        order = Prepare(
            update=copy,
            epoch=offer.epoch,
            version=offer.version,
            transport="copy",
            streams=(Stream(number=0, sender=0, channel=copy),),
            schedules=offer.schedules,
            depth=depth,
            wait_s=min(STEP_S, deadline_s),
        )
        await target.prepare(order, deadline_s=deadline_s)
        await target.pause(mode="retract", deadline_s=deadline_s)
        try:
            manifest = await _transfer(source, target, copy, max(map(len, offer.schedules)), deadline_s)
            await target.finish(copy, deadline_s=deadline_s)
            await target.commit(
                copy, version=offer.version, manifest=manifest, held_as=offer.manifest, deadline_s=deadline_s
            )
        except BaseException:
            with contextlib.suppress(Exception):
                hold = await target.abandon(copy, reason="the copy failed", deadline_s=deadline_s)
                if not hold.reason:
                    await target.resume(deadline_s=deadline_s)
            raise
        await target.resume(deadline_s=deadline_s)
    finally:
        for engine in (source, target):
            with contextlib.suppress(Exception):
                await engine.leave_group(group=copy, deadline_s=deadline_s)


async def _meet(
    source: EngineClient, target: EngineClient, group: str, host: str, backend: str, deadline_s: float
) -> None:
    port, size = free_port(host), 2 * source.world_size
    joins = [
        engine.join_group(
            address=host,
            port=port,
            rank_offset=first,
            world_size=size,
            group=group,
            backend=backend,
            deadline_s=deadline_s,
        )
        for engine, first in ((source, 0), (target, source.world_size))
    ]
    await asyncio.gather(*joins)


async def _transfer(source: EngineClient, target: EngineClient, copy: str, count: int, deadline_s: float) -> str:
    """Returns the manifest of what was sent."""
    manifest = ""
    for _ in range(0, count, AT_ONCE):
        manifest, _ = await asyncio.gather(
            source.send_copy(copy, AT_ONCE, deadline_s=deadline_s),
            target.receive(copy, AT_ONCE, deadline_s=deadline_s),
        )
    return manifest
