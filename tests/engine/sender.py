"""The sender's side of a weight update, played by the test process with the real messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moe_asyncrl.data.weights import Base, Prepare, Stream
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.weights.fuse import fused_group
from moe_asyncrl.weights.group import Meeting, connect, drop
from moe_asyncrl.weights.message import dense_header, message_bytes, payload_view, seal, sparse_header
from moe_asyncrl.weights.message_files import FolderWriter
from moe_asyncrl.weights.message_part import Part, part_view, place_parts, whole_part
from moe_asyncrl.weights.sparse_encode import encode
from moe_asyncrl.weights.stream_digest import StreamDigest, manifest_digest

Weights = Mapping[str, torch.Tensor]
Digests = list[bytes]
NUMBERS = itertools.count()


def read(model: Path) -> dict[str, torch.Tensor]:
    """A model's HF tensors."""
    return {name: value.contiguous() for name, value in load_file(model / "model.safetensors").items()}


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def buckets(weights: Weights, family: str, limit: int = 100_000) -> list[list[Part]]:
    """Whole tensors in buckets of about `limit` bytes, what a loader fuses together."""
    groups: dict[str, list[str]] = {}
    for name in sorted(weights):
        groups.setdefault(fused_group(family, name), []).append(name)
    made: list[list[Part]] = [[]]
    room = limit
    for names in groups.values():
        if room <= 0:
            made.append([])
            room = limit
        for name in names:
            made[-1].append(whole_part(name, dtype_name(weights[name]), weights[name].shape))
            room -= weights[name].nbytes
    return made


def pieces(parts: Sequence[Part], rows: int) -> list[Part]:
    """The parts cut by rows of their first axis, `rows` at most."""
    cut = []
    for part in parts:
        (start, stop, step), *rest = part.ranges
        for low in range(start, stop, rows):
            ranges = ((low, min(low + rows, stop), step), *rest)
            cut.append(Part(part.name, part.dtype, part.shape, ranges, 0))
    return cut


def dense(
    parts: Sequence[Part], weights: Weights, *, epoch: int, version: int, number: int, stream: int = 0
) -> torch.Tensor:
    """A sealed message of all elements of some parts."""
    placed, size = place_parts(parts)
    header = dense_header(placed)
    message = torch.zeros(message_bytes(header, size), dtype=torch.uint8)
    payload = payload_view(message, header)
    for part in placed:
        part_view(part, payload).copy_(weights[part.name][part.slices])
    seal(message, kind="dense", epoch=epoch, version=version, stream=stream, number=number, header=header)
    return message


def sparse(
    parts: Sequence[Part], old: Weights, new: Weights, *, epoch: int, version: int, number: int, stream: int = 0
) -> torch.Tensor:
    """A sealed message of what changed."""
    made, blobs = [], []
    for part in parts:
        before, after = old[part.name][part.slices].contiguous(), new[part.name][part.slices].contiguous()
        blob = encode(before, after, max_fraction=100).blob
        assert blob is not None
        blobs.append(blob)
        made.append(Part(part.name, part.dtype, part.shape, part.ranges, 0, len(blob)))
    placed, size = place_parts(made)
    header = sparse_header(placed)
    message = torch.zeros(message_bytes(header, size), dtype=torch.uint8)
    payload = payload_view(message, header).numpy()
    for part, blob in zip(placed, blobs, strict=True):
        payload[part.offset : part.offset + len(blob)] = np.asarray(blob)
    seal(message, kind="sparse", epoch=epoch, version=version, stream=stream, number=number, header=header)
    return message


def full(weights: Weights, family: str, *, epoch: int, version: int, limit: int = 100_000) -> list[torch.Tensor]:
    """All messages of a full update, in one stream."""
    made = buckets(weights, family, limit)
    return [dense(parts, weights, epoch=epoch, version=version, number=i) for i, parts in enumerate(made)]


def delta(old: Weights, new: Weights, family: str, *, epoch: int, version: int) -> list[torch.Tensor]:
    """All messages of a delta, in one stream."""
    made = buckets(new, family)
    return [sparse(parts, old, new, epoch=epoch, version=version, number=i) for i, parts in enumerate(made)]


def manifest(messages: Sequence[torch.Tensor], stream: int = 0) -> str:
    """The sender's own."""
    return manifests({stream: messages})


def order(
    messages: Sequence[torch.Tensor], channel: str, *, epoch: int, version: int, base: Base | None = None, **more: Any
) -> Prepare:
    """For one stream of these messages, by files in the folder `channel` unless `transport` says otherwise."""
    settings: dict[str, Any] = {"transport": "disk", "wait_s": 10.0, **more}
    return Prepare(
        update=f"update-{next(NUMBERS)}",
        epoch=epoch,
        version=version,
        base=base,
        streams=(Stream(number=0, sender=0, channel=channel),),
        schedules=(tuple((0, len(m)) for m in messages),),
        **settings,
    )


def write(messages: Sequence[torch.Tensor], folder: Path) -> None:
    writer = FolderWriter(folder)
    for number, message in enumerate(messages):
        writer.put(0, number, message)


async def push(
    client: EngineClient,
    messages: Sequence[torch.Tensor],
    folder: Path,
    *,
    epoch: int,
    version: int,
    base: Base | None = None,
    mode: str = "in_place",
    count: int = 4,
) -> Base:
    """A whole update by files: prepare, pause, receive, finish, commit, resume. Returns what the engine holds then."""
    asked = order(messages, str(folder / f"v{version}-{next(NUMBERS)}"), epoch=epoch, version=version, base=base)
    write(messages, Path(asked.streams[0].channel))
    await client.prepare(asked, deadline_s=60)
    await client.pause(mode=mode, deadline_s=60)
    while (await client.receive(asked.update, count, deadline_s=60)).left:
        pass
    found = await client.finish(asked.update, deadline_s=60)
    await client.commit(asked.update, version=version, manifest=manifest(messages), deadline_s=60)
    await client.resume(deadline_s=60)
    assert found == manifest(messages)
    return Base(version=version, manifest=found)


class Group:
    """A process group of the test process and engines."""

    def __init__(self, meeting: Meeting, process_group: Any) -> None:
        self.name = meeting.rendezvous.name
        self._process_group = process_group

    @classmethod
    async def form(cls, engines: Sequence[EngineClient]) -> Group:
        name = f"receiver-{next(NUMBERS)}"
        meeting = await Meeting.open(engines, name=name, host="127.0.0.1", backend="gloo", timeout_s=60)
        process_group = await asyncio.to_thread(connect, meeting.rendezvous)
        await meeting.finish()
        return cls(meeting, process_group)

    def broadcast(self, message: torch.Tensor) -> Any:
        """Begin; `wait` on what it returns."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self._process_group.broadcast([message], options)

    def send(self, message: torch.Tensor, rank: int, number: int) -> Any:
        return self._process_group.send([message], rank, number)

    def drop(self) -> None:
        drop(self._process_group)
        self._process_group = None


def manifests(streams: Mapping[int, Sequence[torch.Tensor]]) -> str:
    """The sender's own, over several streams."""
    values = {}
    for number, messages in streams.items():
        digest = StreamDigest()
        for message in messages:
            digest.add(message[48:64].numpy().tobytes())
        values[number] = digest.value
    return manifest_digest(values)
