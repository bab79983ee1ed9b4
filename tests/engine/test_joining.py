"""An engine waits for the other members of an update's group as long as the group's name says, and serves again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.weights.group import group_name, wait_of
from tests.engines.fixtures import TestEngine

PEER = """
import sys
from moe_asyncrl.weights.group import Rendezvous, connect
name, port = sys.argv[1:]
connect(Rendezvous(name=name, host="127.0.0.1", port=int(port), world_size=2, backend="gloo", timeout_s=60))
"""


def test_a_name_says_how_long() -> None:
    assert wait_of(group_name("weights-1", 2.5)) == 2.5 and wait_of(group_name("copy@3", 300)) == 300
    assert wait_of("weight_update_group") is None and wait_of(None) is None


@pytest.mark.parametrize("arrives", [False, True], ids=["a member that never comes", "a member that came and died"])
def test_a_member_that_is_not_there_holds_an_engine_up_for_a_bounded_time(
    fresh: TestEngine, arrives: bool, tmp_path: Path
) -> None:
    """The peer is a process of its own, since it has to die."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), wait_for_workers=False)
    name = group_name("left-alone", 2.0)
    if arrives:
        with (tmp_path / "peer.log").open("w") as log:
            peer = subprocess.Popen([sys.executable, "-c", PEER, name, str(store.port)], stderr=log)
        try:
            end = time.monotonic() + 60
            while not any(str(key).endswith("cpu//0/0") for key in store.list_keys()):
                assert time.monotonic() < end and peer.poll() is None, (tmp_path / "peer.log").read_text()
                time.sleep(0.05)
        finally:
            peer.kill()
            peer.wait()

    async def joins(client: EngineClient) -> float:
        began = time.monotonic()
        with pytest.raises(UserError, match="joining update group"):
            await client.join_group(
                address="127.0.0.1",
                port=store.port,
                rank_offset=1,
                world_size=2,
                group=name,
                backend="gloo",
                deadline_s=60,
            )
        took = time.monotonic() - began
        assert (await client.hold(deadline_s=5)).state == "serving"
        return took

    async def body() -> float:
        async with fresh.client() as client:
            return await joins(client)

    assert asyncio.run(body()) < 20
