"""SGLang's own way to take weights from a trainer, as a user would script it: one tensor, one request, one broadcast.

    pause ─▶ begin ─▶ for each tensor: request ∥ broadcast, reply ─▶ end ─▶ continue

Nothing is hashed. The tensors lie ready under their HF names, in the engine's type, before the clock starts;
connections are kept. The process group is that of SGLang's documentation: gloo, the trainer is rank 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import aiohttp
import torch
import torch.distributed as dist

GROUP = "one-by-one"
TIMEOUT = timedelta(seconds=120)
_c10d: Any = dist


async def one_by_one(url: str, key: str, tensors: Mapping[str, torch.Tensor], version: str) -> float:
    """Bring `tensors` to the server; seconds from the pause to generation. Raises RuntimeError if it refuses."""
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT.total_seconds())
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def post(path: str, **body: Any) -> None:
            async with session.post(f"{url}/{path}", json=body) as reply:
                text = await reply.text()
                if reply.status != 200 or '"success":false' in text.replace(" ", ""):
                    raise RuntimeError(f"{path}: HTTP {reply.status}: {text[:300]}")

        store = _c10d.TCPStore("127.0.0.1", 0, 2, True, TIMEOUT, wait_for_workers=False)
        meeting = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
        joined = asyncio.create_task(post("init_weights_update_group", group_name=GROUP, backend="gloo", **meeting))
        group = await asyncio.to_thread(_connect, store)
        await joined
        began = time.perf_counter()
        await post("pause_generation", mode="in_place")
        await post("begin_weight_update")
        names = list(tensors)
        for name in names:
            tensor = tensors[name]
            body: dict[str, Any] = {
                "names": [name],
                "dtypes": [str(tensor.dtype).removeprefix("torch.")],
                "shapes": [list(tensor.shape)],
                "group_name": GROUP,
                "flush_cache": False,
            }
            if name is names[-1]:
                body["weight_version"] = version
            asked = asyncio.create_task(post("update_weights_from_distributed", **body))
            await asyncio.to_thread(_send, group, tensor)
            await asked
        await post("end_weight_update")
        await post("continue_generation")
        seconds = time.perf_counter() - began
        await post("destroy_weights_update_group", group_name=GROUP)
    return seconds


def _connect(store: Any) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    # SGLang puts the group's name in front of the keys, and torch the name again and the device.
    keys = _c10d.PrefixStore("cpu/", _c10d.PrefixStore(f"{GROUP}/", _c10d.PrefixStore(GROUP, store)))
    return _c10d.ProcessGroupGloo(keys, 0, 2, options)


def _send(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    group.broadcast([tensor], options).wait()
