"""Places of other families: a full update through the loader, one through places, against transformers and the loader.

The tests of the default suite have Qwen3-MoE on one rank and on two; these need engines of their own: `make soak`, or
`pytest tests/engine/soak_receiver.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import sender
from tests.engine.test_receiver import TOLERANCE, deviation, one, request
from tests.engines.epochs import next_epoch
from tests.engines.fixtures import TestEngine
from tests.engines.models import Reference, make_model


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "gpt_oss"])
def test_places_equal_the_loader(engine: Callable[..., TestEngine], tmp_path: Path, family: str) -> None:
    target, epoch = engine(family=family), next_epoch()
    models = [Reference(make_model(family, tmp_path / f"model-{seed}", seed=seed)) for seed in (1, 2)]

    async def go() -> None:
        async with target.client() as client:
            for version, model in enumerate(models, 1):
                messages = sender.full(sender.read(model.path), family, epoch=epoch, version=version)
                await sender.push(client, messages, tmp_path, epoch=epoch, version=version)
                assert deviation(model, await one(client, request(8, version=version))) <= TOLERANCE
                # The second one went to places, and nothing needs the loader any more.
                assert (await client.hold(deadline_s=20)).whole_only == ""
            by_places = await client.checksum(deadline_s=60)
            await client.load_weights(str(models[1].path), 3, flush=False, deadline_s=60)
            assert await client.checksum(deadline_s=60) == by_places

    asyncio.run(go())
    target.reset()
