"""An engine that gives its memory back: only when idle, woken in order, and silent until its weights are whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import numpy as np
import pytest

from moe_asyncrl.data.errors import StaleEpoch, UserError
from moe_asyncrl.data.weights import Base, Prepare, Stream
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.command import EngineArgs, build_command
from moe_asyncrl.engine.completion import Completion
from moe_asyncrl.engine.errors import EngineRefused
from moe_asyncrl.engine.plugin.weights_state import Holding, Refused
from moe_asyncrl.weights.turns import Move, Turn, Turns
from tests.engine.test_updates import busy, deviation, request
from tests.engines.epochs import next_epoch
from tests.engines.fixtures import EngineHouse, TestEngine
from tests.engines.models import Reference, make_model

TOLERANCE = 1e-5


async def refused(call: Awaitable[object], says: str) -> None:
    with pytest.raises(EngineRefused, match=says):
        await call


def test_a_turn_in_its_order_and_nothing_out_of_it(
    fresh: TestEngine, engines: EngineHouse, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A request lives through a turn; another one comes while the engine sleeps; both wait and are answered rightly."""
    other = Reference(make_model("qwen3_moe", tmp_path_factory.mktemp("slept") / "model", seed=1))
    # The engine serves other tests too, and has seen their epochs.
    epoch = next_epoch()

    async def go(client: EngineClient) -> tuple[object, Completion, object, Completion]:
        await refused(client.sleep(epoch=epoch, deadline_s=20), "has to be paused before it sleeps")
        first, living = await busy(client, 600)
        await client.pause(mode="in_place", deadline_s=20)
        await refused(client.sleep(epoch=epoch, deadline_s=20), r"it is not idle: 1 requests run")
        assert (await client.hold(deadline_s=20)).released == ()
        await client.pause(mode="retract", deadline_s=20)
        held = await client.sleep(epoch=epoch, deadline_s=20)
        assert (held.state, held.released) == ("asleep", ("weights", "cache")) and held.reason

        second = request(8)
        waiting = asyncio.create_task(client.generate([second], deadline_s=60))
        await refused(client.resume(deadline_s=20), "cannot go on, its weights are asleep")
        await refused(client.sleep(epoch=epoch, deadline_s=20), "cannot sleep: it is asleep")
        await refused(client.checksum(deadline_s=20), "given back")
        await refused(client.load_weights(str(other.path), 7, flush=False, deadline_s=20), "given back; wake it first")
        await refused(client.wake("cache", epoch=epoch, deadline_s=20), "after the commit of new weights")
        with pytest.raises(StaleEpoch):
            await client.wake("weights", epoch=-2, deadline_s=20)
        assert (await client.wake("weights", epoch=epoch, deadline_s=20)).released == ("cache",)
        await refused(client.wake("weights", epoch=epoch, deadline_s=20), "memory of weights is not given back")
        # Memory alone is no weights.
        await refused(client.resume(deadline_s=20), "cannot go on, its weights are asleep")
        await client.load_weights(str(other.path), 7, flush=False, deadline_s=60)
        await refused(client.resume(deadline_s=20), "its memory of cache is given back")
        assert not waiting.done() and not living.done()
        held = await client.wake("cache", epoch=epoch, deadline_s=20)
        assert (held.state, held.released, held.version) == ("serving", (), 7)
        await client.resume(deadline_s=20)
        return first, (await living)[0], second, (await waiting)[0]

    async def with_client() -> tuple[object, Completion, object, Completion]:
        async with fresh.client() as client:
            return await go(client)

    first, living, second, waited = asyncio.run(with_client())
    assert set(living.versions.tolist()) == {-1, 7}
    switch = int(np.argmax(living.versions == 7))
    # Its keys and values were computed anew, so from the switch on it is the new model's in full.
    assert deviation(other, first, living)[switch:].max() <= TOLERANCE  # type: ignore[arg-type]
    assert deviation(fresh.reference, first, living)[:switch].max() <= TOLERANCE  # type: ignore[arg-type]
    assert deviation(fresh.reference, first, living)[switch:].max() >= 100 * TOLERANCE  # type: ignore[arg-type]
    assert set(waited.versions.tolist()) == {7}
    assert deviation(other, second, waited).max() <= TOLERANCE  # type: ignore[arg-type]
    assert deviation(fresh.reference, second, waited).max() >= 100 * TOLERANCE  # type: ignore[arg-type]


def order(update: str, *, base: Base | None = None, epoch: int = 1, version: int = 5) -> Prepare:
    return Prepare(
        update=update,
        epoch=epoch,
        version=version,
        base=base,
        transport="shared_memory",
        streams=(Stream(number=0, sender=0, channel="/dev/shm/x"),),
        schedules=(((0, 64),),),
    )


def test_what_slept_takes_all_weights_and_nothing_less() -> None:
    holding = Holding(4, manifest="m", whole_only="")
    holding.check_sleep(1)
    holding.fall_asleep()
    assert not holding.sound
    with pytest.raises(Refused, match="needs all weights, not changes: it sleeps"):
        holding.check_order(order("a", base=Base(version=4, manifest="m")), 1)
    holding.check_order(order("a"), 1)
    holding.prepare(order("a"))
    assert not holding.sound
    # An update that never began leaves it asleep: what waits is not answered with an error.
    holding.fail("the trainer went away")
    assert holding.state == "asleep"
    holding.prepare(order("b"))
    holding.first_byte()
    assert not holding.asleep and "update b to version 5 was not committed" in holding.reason
    holding.received()
    holding.commit(5, "n", "n")
    assert holding.sound and holding.version == 5
    holding.check_sleep(1)
    with pytest.raises(StaleEpoch):
        holding.check_sleep(0)
    holding.fall_asleep()
    holding.prepare(order("c", version=6))
    holding.first_byte()
    holding.fail("cut short")
    assert (holding.state, holding.reason) == ("broken", "cut short")
    with pytest.raises(Refused, match="cannot sleep: it is broken"):
        holding.check_sleep(1)


RIGHT: tuple[tuple[Turn, Move], ...] = (
    ("engines", "rest"), ("trainer", "weights"), ("update", "cache"), ("committed", "go_on"),
    ("engines", "weights"), ("update", "weights"),
)  # fmt: skip
TURNS: tuple[Turn, ...] = ("engines", "trainer", "update", "committed")
MOVES: tuple[Move, ...] = ("rest", "weights", "cache", "go_on")


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("move", MOVES)
def test_turns_come_in_one_order(turn: Turn, move: Move) -> None:
    turns = Turns(turn)
    if (turn, move) in RIGHT:
        turns.go(move)
        assert (turns.turn == "trainer") == (move == "rest")
    else:
        with pytest.raises(UserError, match=r"colocated: cannot .* now: it is the turn of"):
            turns.go(move)
        assert turns.turn == turn


def test_only_a_gpu_engine_that_shares_is_started_with_the_memory_saver() -> None:
    flag = "--enable-memory-saver"
    shared = EngineArgs(model="m", port=1, python="python", colocated=True)
    assert flag in build_command(shared, cpu=False).argv
    assert flag not in build_command(shared, cpu=True).argv
    assert flag not in build_command(EngineArgs(model="m", port=1, python="python"), cpu=False).argv
