"""The receiver of weights in a real engine; the sender is the test process with the real messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from moe_asyncrl.data.errors import StaleEpoch
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.data.weights import Base, Prepare, Stream
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.engine.copy_weights import copy_weights
from moe_asyncrl.engine.errors import EngineRefused, EngineUnwell
from moe_asyncrl.weights.message_part import whole_part
from moe_asyncrl.weights.ring import RingWriter
from tests.engine import sender
from tests.engines.epochs import next_epoch
from tests.engines.fixtures import EngineHouse, TestEngine
from tests.engines.models import Reference, make_model

TOLERANCE = 1e-5
FAMILY = "qwen3_moe"
COUNTER = itertools.count()
PROMPT = [5, 9, 33, 80, 101, 7, 8]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    """Two other sets of weights of the same architecture."""
    folder = tmp_path_factory.mktemp("received")
    return [Reference(make_model(FAMILY, folder / f"model-{seed}", seed=seed)) for seed in (1, 2)]


def request(tokens: int, *, version: int = 0, prompt: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest(
        rid=f"receiver-{next(COUNTER)}",
        input_ids=prompt or PROMPT,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens),
        version=version,
        ignore_eos=True,
    )


def run(engine: TestEngine, body: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        async with engine.client() as client:
            return await body(client)

    return asyncio.run(go())


async def one(client: EngineClient, asked: GenerateRequest, deadline_s: float = 60) -> Completion:
    (done,) = await client.generate([asked], deadline_s=deadline_s)
    return done


def deviation(reference: Reference, done: Completion, prompt: list[int] | None = None) -> float:
    return float(np.abs(reference.logprobs(prompt or PROMPT, done.output_ids) - done.logprobs).max())


def changed(weights: sender.Weights, seed: int) -> dict[str, torch.Tensor]:
    """A few other bits in most tensors; zeros that change their sign among them."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, value in weights.items():
        made[name] = value.clone()
        where = torch.rand(value.shape, generator=g) < 0.03
        made[name][where] *= 1.25
        made[name].view(-1)[0] = -0.0 if seed % 2 else 0.0
    return made


def test_full_by_places_and_changes_equal_the_loader(
    fresh: TestEngine, models: list[Reference], tmp_path: Path
) -> None:
    first, second = (sender.read(m.path) for m in models)
    epoch = next_epoch()

    async def body(client: EngineClient) -> None:
        async def push(messages: list[torch.Tensor], version: int, base: Base | None = None) -> Base:
            return await sender.push(client, messages, tmp_path, epoch=epoch, version=version, base=base)

        await push(sender.full(first, FAMILY, epoch=epoch, version=1), 1)
        assert (await client.hold(deadline_s=20)).whole_only == ""
        done = await one(client, request(8, version=1))
        assert deviation(models[0], done) <= TOLERANCE and set(done.versions.tolist()) == {1}
        held = await push(sender.full(second, FAMILY, epoch=epoch, version=2), 2)
        assert deviation(models[1], await one(client, request(8, version=2))) <= TOLERANCE
        assert deviation(models[0], await one(client, request(8, version=2))) >= 100 * TOLERANCE
        by_places = await client.checksum(deadline_s=60)

        # The same weights as changes to others, twice, and cut into rows.
        old = second
        for version in (3, 4):
            new = changed(old, version)
            messages = sender.delta(old, new, FAMILY, epoch=epoch, version=version)
            held, old = await push(messages, version, held), new
        by_changes = await client.checksum(deadline_s=60)
        parts = sender.pieces([p for b in sender.buckets(old, FAMILY) for p in b], 50)
        cut = [sender.dense(parts[i::3], old, epoch=epoch, version=5, number=i) for i in range(3)]
        await push(cut, 5)
        assert await client.checksum(deadline_s=60) == by_changes != by_places

        await client.load_weights(str(models[1].path), 6, flush=False, deadline_s=60)
        assert await client.checksum(deadline_s=60) == by_places
        hold = await client.hold(deadline_s=20)
        assert (hold.state, hold.version, hold.manifest) == ("serving", 6, "")
        state = (await client._call("GET", "/server_info", None, 20, "state")).decode()
        assert '"moe_asyncrl_weights":{"state":"serving","version":6' in state.replace(" ", "")

    run(fresh, body)


def flipped(messages: list[torch.Tensor]) -> list[torch.Tensor]:
    messages[-1][-5] ^= 4
    return messages


DAMAGE: dict[str, tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], str]] = {
    "a flipped bit": (flipped, r"message \d+ of version 8 from trainer rank 0 is damaged on its way"),
    "an order": (lambda m: [*m[:-2], m[-1], m[-2]], r"is another one: it has number|bytes, \d+ were announced"),
    "a missing message": (lambda m: m[:-1], r"message \d+ of trainer rank 0 .* did not come: waited 1 s"),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "version", "epoch", "a missing tensor"])
def test_damage_is_refused_and_nothing_mixed_is_served(
    fresh: TestEngine, models: list[Reference], tmp_path: Path, damage: str
) -> None:
    weights, epoch = sender.read(models[0].path), next_epoch()
    right = sender.full(weights, FAMILY, epoch=epoch, version=8)
    sent, text = right, ""
    if damage in DAMAGE:
        change, text = DAMAGE[damage]
        sent = change([m.clone() for m in right])
    elif damage == "a missing tensor":
        rest = {n: t for n, t in weights.items() if n != "model.layers.2.mlp.experts.5.up_proj.weight"}
        sent, text = sender.full(rest, FAMILY, epoch=epoch, version=8), r"model\.layers\.2\.mlp\.experts\.w13_weight"
        right = sent
    else:
        other = {"version": (epoch, 9), "epoch": (epoch + 1, 8)}[damage]
        wrong = sender.full(weights, FAMILY, epoch=other[0], version=other[1])
        sent, text = [*right[:2], *wrong[2:]], rf"is another one: it has {damage} \d+ in place of \d+"
    if damage != "a missing message":
        right = right if len(right) == len(sent) else sent

    async def body(client: EngineClient) -> None:
        asked = sender.order(right, str(tmp_path / "sent"), epoch=epoch, version=8, wait_s=1.0)
        sender.write(sent, tmp_path / "sent")
        await client.prepare(asked, deadline_s=20)
        running = asyncio.create_task(client.generate([request(900)], deadline_s=120))
        await asyncio.sleep(0.3)
        await client.pause(mode="in_place", deadline_s=20)
        queued = asyncio.create_task(one(client, request(4), 60))
        assert (await client.receive(asked.update, 1, deadline_s=60)).received == 1
        hold = await client.hold(deadline_s=20)
        assert (hold.state, hold.version, hold.paused, hold.update) == ("receiving", -1, True, asked.update)
        with pytest.raises(EngineRefused, match="cannot go on, its weights are receiving"):
            await client.resume(deadline_s=20)
        with pytest.raises(EngineRefused, match=text):
            await client.receive(asked.update, len(right), deadline_s=60)
            await client.finish(asked.update, deadline_s=60)
        hold = await client.hold(deadline_s=20)
        assert (hold.state, hold.version, hold.paused, hold.update) == ("broken", -1, True, "") and hold.reason
        # What ran, what waited and what comes now are answered at once, and with no token.
        for waiting in (running, queued, asyncio.create_task(one(client, request(4), 20))):
            with pytest.raises(EngineUnwell, match="weights are not whole"):
                await waiting
        with pytest.raises(EngineRefused, match="cannot go on, its weights are broken"):
            await client.resume(deadline_s=20)
        with pytest.raises(EngineRefused, match="it needs all weights, not changes"):
            base = Base(version=-1, manifest="x")
            await client.prepare(sender.order(right, "", epoch=epoch, version=9, base=base), deadline_s=20)
        whole = sender.full(weights, FAMILY, epoch=epoch, version=9)
        await sender.push(client, whole, tmp_path, epoch=epoch, version=9)
        done = await one(client, request(8, version=9))
        assert deviation(models[0], done) <= TOLERANCE and set(done.versions.tolist()) == {9}

    run(fresh, body)


def test_orders_that_are_refused(fresh: TestEngine, models: list[Reference], tmp_path: Path) -> None:
    weights = sender.read(models[0].path)
    next_epoch()
    epoch = next_epoch()
    messages = sender.full(weights, FAMILY, epoch=epoch, version=3, limit=1 << 30)

    async def body(client: EngineClient) -> None:
        async def refused(text: str, call: Awaitable[object], kind: type[Exception] = EngineRefused) -> None:
            with pytest.raises(kind, match=text):
                await call

        held = await sender.push(client, messages, tmp_path, epoch=epoch, version=3)
        folder = str(tmp_path / "next")
        more = sender.full(weights, FAMILY, epoch=epoch, version=4, limit=1 << 30)
        sender.write(more, tmp_path / "next")

        def order(**other: Any) -> Prepare:
            return sender.order(more, folder, **{"epoch": epoch, "version": 4, **other})

        await refused("another trainer owns the run", client.prepare(order(epoch=epoch - 1), deadline_s=20), StaleEpoch)
        await refused("version 3 does not rise", client.prepare(order(version=3), deadline_s=20))
        base = Base(version=3, manifest="0" * 32)
        await refused(f"holds version 3 with manifest {held.manifest}", client.prepare(order(base=base), deadline_s=20))
        group = order(transport="broadcast")
        await refused("not in the process group", client.prepare(group, deadline_s=20))
        await refused("no update is under way", client.receive("none", 1, deadline_s=20))
        asked = order()
        await client.prepare(asked, deadline_s=20)
        assert (await client.hold(deadline_s=20)).state == "prepared"
        await refused("has to be paused", client.receive(asked.update, 1, deadline_s=20))
        assert deviation(models[0], await one(client, request(4, version=3))) <= TOLERANCE
        # Before the first byte nothing is lost.
        hold = await client.abandon(asked.update, reason="changed its mind", deadline_s=20)
        assert (hold.state, hold.version, hold.manifest) == ("serving", 3, held.manifest)
        await refused(f"update {asked.update} already", client.prepare(asked, deadline_s=20))
        asked = order()
        await client.prepare(asked, deadline_s=20)
        await client.pause(mode="in_place", deadline_s=20)
        await refused("0 of 1 messages came", client.finish(asked.update, deadline_s=20))
        hold = await client.hold(deadline_s=20)
        assert (hold.state, hold.version, hold.manifest, hold.paused) == ("serving", 3, held.manifest, True)
        asked = order()
        await client.prepare(asked, deadline_s=20)
        await client.receive(asked.update, 1, deadline_s=20)
        await refused("is under way .receiving.", client.prepare(order(), deadline_s=20))
        await refused("is receiving, not received", client.commit(asked.update, version=4, manifest="", deadline_s=20))
        loading = client.load_weights(str(models[1].path), 9, flush=False, deadline_s=20)
        await refused("is under way; abandon it first", loading)
        found = await client.finish(asked.update, deadline_s=20)
        assert (await client.hold(deadline_s=20)).state == "received"
        await refused("cannot be committed", client.commit(asked.update, version=4, manifest="no", deadline_s=20))
        await refused("cannot go on, its weights are received", client.resume(deadline_s=20))
        await client.commit(asked.update, version=4, manifest=found, deadline_s=20)
        hold = await client.hold(deadline_s=20)
        assert (hold.state, hold.version, hold.manifest, hold.epoch) == ("serving", 4, found, epoch)
        assert await client.serving_version(deadline_s=20) == 4
        await client.resume(deadline_s=20)
        assert (await one(client, request(2))).versions.tolist() == [4, 4]

    run(fresh, body)


def test_no_prefix_is_shared_over_a_commit(fresh: TestEngine, models: list[Reference], tmp_path: Path) -> None:
    weights, epoch = sender.read(models[0].path), next_epoch()
    messages = sender.full(weights, FAMILY, epoch=epoch, version=1)
    prompt = list(range(10, 74))

    async def body(client: EngineClient) -> None:
        stale = request(2, version=-1, prompt=prompt)
        await one(client, stale)
        assert (await one(client, request(2, version=-1, prompt=prompt))).cached_tokens == len(prompt) - 1
        asked = sender.order(messages, str(tmp_path / "sent"), epoch=epoch, version=1)
        sender.write(messages, tmp_path / "sent")
        await client.prepare(asked, deadline_s=20)
        # One that the scheduler holds in its queue from before the update: the engine runs 64 at once.
        many = [request(40, version=-1, prompt=[*prompt, i]) for i in range(90)]
        running = asyncio.create_task(client.generate(many, deadline_s=120))
        await asyncio.sleep(0.5)
        await client.pause(mode="in_place", deadline_s=20)
        during = asyncio.create_task(one(client, request(2, version=-1, prompt=prompt)))
        await client.receive(asked.update, len(messages), deadline_s=60)
        found = await client.finish(asked.update, deadline_s=60)
        await client.commit(asked.update, version=1, manifest=found, deadline_s=20)
        await client.resume(deadline_s=20)
        after = [await during, await one(client, request(2, version=-1, prompt=[*prompt[:-1], 3]))]
        assert deviation(models[0], after[0], prompt) <= TOLERANCE
        assert deviation(models[0], after[1], [*prompt[:-1], 3]) <= TOLERANCE
        done = await running
        late = [(r, d) for r, d in zip(many, done, strict=True) if set(d.versions.tolist()) == {1}]
        assert late, "no request waited through the update"
        for asked_late, answer in late:
            assert deviation(models[0], answer, list(asked_late.input_ids)) <= TOLERANCE
        again = await one(client, request(2, version=-1, prompt=prompt))
        assert again.cached_tokens == len(prompt) - 1 and deviation(models[0], again, prompt) <= TOLERANCE

    run(fresh, body)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_that_lives_through_an_update(
    fresh: TestEngine, models: list[Reference], tmp_path: Path, mode: str
) -> None:
    epoch = next_epoch()
    messages = sender.full(sender.read(models[0].path), FAMILY, epoch=epoch, version=1)

    async def body(client: EngineClient) -> Completion:
        task = asyncio.create_task(one(client, request(300, version=-1), 120))
        await asyncio.sleep(0.4)
        await sender.push(client, messages, tmp_path, epoch=epoch, version=1, mode=mode)
        return await task

    done = run(fresh, body)
    switch = int((done.versions == -1).sum())
    assert 0 < switch < 300 and (done.versions[switch:] == 1).all()
    expected = through_update(fresh.reference, models[0], done, switch, keep=mode == "in_place")
    other = through_update(fresh.reference, models[0], done, switch, keep=mode != "in_place")
    assert np.abs(expected - done.logprobs).max() <= TOLERANCE
    assert np.abs(other - done.logprobs)[switch:].max() >= 100 * TOLERANCE


def through_update(old: Reference, new: Reference, done: Completion, switch: int, *, keep: bool) -> np.ndarray:
    """What transformers says where `old` became `new` before output token `switch`; `keep`: the old KV stays."""
    before = old.logprobs(PROMPT, done.output_ids[:switch])
    if not keep:
        return np.concatenate([before, new.logprobs(PROMPT, done.output_ids)[switch:]])
    ids = [*PROMPT, *map(int, done.output_ids)]
    edge = len(PROMPT) + switch - 1
    with torch.no_grad():
        past = old.model(torch.tensor([ids[:edge]]), use_cache=True).past_key_values
        logits = new.model(torch.tensor([ids[edge:-1]]), past_key_values=past).logits[0]
    after = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[edge + 1 :])[:, None])[:, 0]
    return np.concatenate([before, after.numpy()])


async def transfer(client: EngineClient, asked: Prepare, expected: str) -> None:
    """Everything between the sends and the end of an update that is prepared."""
    while (await client.receive(asked.update, 3, deadline_s=60)).left:
        pass
    assert await client.finish(asked.update, deadline_s=60) == expected
    await client.commit(asked.update, version=asked.version, manifest=expected, deadline_s=60)
    await client.resume(deadline_s=60)


def test_broadcast_and_slices_to_two_ranks(engine: Callable[..., TestEngine], models: list[Reference]) -> None:
    """Several messages in flight in a real group; then point to point, with messages of its own for each rank."""
    target, epoch = engine(tp=2, ep=2), next_epoch()
    target.reset()
    first, second = (sender.read(m.path) for m in models)

    async def body(client: EngineClient) -> None:
        group = await sender.Group.form([client])
        messages = sender.full(first, FAMILY, epoch=epoch, version=1)
        asked = sender.order(messages, group.name, epoch=epoch, version=1, transport="broadcast", depth=3)
        await client.prepare(asked, deadline_s=20)
        await client.pause(mode="in_place", deadline_s=20)
        works = [group.broadcast(m) for m in messages]
        await transfer(client, asked, sender.manifest(messages))
        for work in works:
            work.wait()
        assert deviation(models[0], await one(client, request(8))) <= TOLERANCE
        assert (await client.hold(deadline_s=20)).whole_only == ""

        # Each expert to the rank that has it only.
        streams: dict[int, list[torch.Tensor]] = {}
        for rank in range(2):
            kept = [
                n
                for n in sorted(second)
                if ".experts." not in n or int(n.split(".experts.")[1].split(".")[0]) // 4 == rank
            ]
            parts = [whole_part(n, "float32", second[n].shape) for n in kept]
            streams[rank] = [
                sender.dense(parts[i::2], second, epoch=epoch, version=2, number=i, stream=rank) for i in range(2)
            ]
        asked = Prepare(
            update="slices",
            epoch=epoch,
            version=2,
            transport="direct",
            streams=tuple(Stream(number=r, sender=0, channel=group.name) for r in streams),
            schedules=tuple(tuple((r, len(m)) for m in streams[r]) for r in streams),
            wait_s=10,
        )
        await client.prepare(asked, deadline_s=20)
        await client.pause(mode="in_place", deadline_s=20)
        works = [group.send(m, 1 + r, i) for r in streams for i, m in enumerate(streams[r])]
        await transfer(client, asked, sender.manifests(streams))
        for work in works:
            work.wait()
        assert deviation(models[1], await one(client, request(8))) <= TOLERANCE
        by_places = await client.checksum(deadline_s=60)
        await client.load_weights(str(models[1].path), 3, flush=False, deadline_s=60)
        assert await client.checksum(deadline_s=60) == by_places
        await client.leave_group(group=group.name, deadline_s=20)
        group.drop()

    run(target, body)
    target.reset()


def test_thirty_updates_leave_nothing_behind(fresh: TestEngine, models: list[Reference], tmp_path: Path) -> None:
    """Through shared memory, each with a ring of its own, and a process group formed and left every fifth time."""
    weights = sender.read(models[0].path)
    epoch = next_epoch()

    def used() -> tuple[int, int, int]:
        family = psutil.Process(fresh.server.pid).children(recursive=True)
        rings = sum(Path(f"/proc/{p.pid}/maps").read_text().count("/ring-") for p in family)
        return max(p.memory_info().rss for p in family), sum(p.num_fds() for p in family), rings

    async def body(client: EngineClient) -> None:
        before = (0, 0, 0)
        for version in range(1, 41):
            messages = sender.full(weights, FAMILY, epoch=epoch, version=version)
            if version % 5 == 0:
                group = await sender.Group.form([client])
                await client.leave_group(group=group.name, deadline_s=20)
                group.drop()
            ring = RingWriter(
                Path(f"/dev/shm/{tmp_path.name}-ring-{version}"),
                slots=2,
                slot_bytes=max(map(len, messages)),
                readers=1,
            )
            try:
                asked = sender.order(messages, str(ring.path), epoch=epoch, version=version, transport="shared_memory")
                await client.prepare(asked, deadline_s=20)
                await client.pause(mode="in_place", deadline_s=20)

                def fill(ring: RingWriter = ring, messages: list[torch.Tensor] = messages) -> None:
                    for message in messages:
                        ring.slot(len(message), wait_s=20).copy_(message)
                        ring.publish(len(message))

                writing = asyncio.create_task(asyncio.to_thread(fill))
                await transfer(client, asked, sender.manifest(messages))
                await writing
            finally:
                ring.close()
            if version == 10:
                before = used()
        after = used()
        assert after[2] == before[2] == 0
        assert after[1] <= before[1] + 2
        assert after[0] - before[0] <= 4 << 20

    run(fresh, body)


def test_an_engine_gives_its_weights_to_another(
    fresh: TestEngine, engines: EngineHouse, engine: Callable[..., TestEngine], models: list[Reference], tmp_path: Path
) -> None:
    late = engine(index=1)
    late.reset()
    epoch = next_epoch()
    messages = sender.full(sender.read(models[0].path), FAMILY, epoch=epoch, version=5)

    async def body(client: EngineClient) -> None:
        async with late.client() as other:
            with pytest.raises(EngineRefused, match="no committed weights"):
                await copy_weights(client, other, host="127.0.0.1", deadline_s=60)
            held = await sender.push(client, messages, tmp_path, epoch=epoch, version=5)
            running = asyncio.create_task(one(client, request(300)))
            await copy_weights(client, other, host="127.0.0.1", deadline_s=60, bucket_bytes=50_000)
            hold = await other.hold(deadline_s=20)
            assert (hold.state, hold.version, hold.manifest, hold.epoch) == ("serving", 5, held.manifest, epoch)
            assert not hold.paused and await other.serving_version(deadline_s=20) == 5
            assert await other.checksum(deadline_s=60) == await client.checksum(deadline_s=60)
            assert deviation(models[0], await one(other, request(8))) <= TOLERANCE
            assert (await running).finish_reason == "length"

    run(fresh, body)
    late.reset()
