"""Weights from one engine to another of the same layout, rank to rank: parameters as they are, in sealed messages.

The sender's ranks come first in the group, so that rank r sends to rank `ranks + r`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_asyncrl.engine.plugin.weights_places import Params
from moe_asyncrl.engine.plugin.weights_sources import TransferFailed, wait_for
from moe_asyncrl.engine.plugin.weights_state import Refused
from moe_asyncrl.weights.message import Opened, dense_header, message_bytes, payload_start
from moe_asyncrl.weights.message_device import seal_on_device
from moe_asyncrl.weights.message_part import Part, part_view, place_parts
from moe_asyncrl.weights.stream_digest import StreamDigest, manifest_digest


def storages(params: Params) -> dict[str, torch.Tensor]:
    """All memory of the parameters, each storage once, flat, by the name of the first parameter in it."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, param in params.items():
        storage = param.untyped_storage()
        if storage.nbytes():
            flat = param.detach().as_strided((storage.nbytes() // param.element_size(),), (1,), 0)
            found.setdefault(storage.data_ptr(), (name, flat))
    return dict(found.values())


@dataclass(frozen=True)
class Planned:
    """One message of a copy."""

    parts: tuple[Part, ...]
    header: bytes
    size: int


def plan_copy(memory: Mapping[str, torch.Tensor], bucket_bytes: int) -> list[Planned]:
    """All of `memory` in messages with payloads of at most about `bucket_bytes`."""
    return [_planned(parts) for parts in _groups(memory, max(1, bucket_bytes))]


def _groups(memory: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[Part]]:
    parts: list[Part] = []
    room = limit
    for name, flat in memory.items():
        dtype, start, total = str(flat.dtype).removeprefix("torch."), 0, flat.numel()
        while start < total:
            count = min(total - start, max(1, room // flat.element_size()))
            parts.append(Part(name, dtype, (total,), ((start, start + count, 1),), 0))
            start += count
            room -= count * flat.element_size()
            if room < 64:
                yield parts
                parts, room = [], limit
    if parts:
        yield parts


def _planned(parts: list[Part]) -> Planned:
    placed, payload = place_parts(parts)
    header = dense_header(placed)
    return Planned(placed, header, message_bytes(header, payload))


class CopySender:
    """One rank's share of an offer."""

    def __init__(
        self, params: Params, group: Any, *, peer: int, bucket_bytes: int, epoch: int, version: int, wait_s: float
    ) -> None:
        """`peer`: the receiver's rank in `group`."""
        self._memory = storages(params)
        self.plan = plan_copy(self._memory, bucket_bytes)
        self._group, self._peer, self._wait_s = group, peer, wait_s
        self.epoch, self.version = epoch, version
        self._digest = StreamDigest()
        device = next(iter(self._memory.values())).device
        largest = max(m.size for m in self.plan)
        self._buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
        self._host = self._buffer if device.type == "cpu" else torch.empty(largest, dtype=torch.uint8)

    def send(self, count: int) -> str:
        """Send the next `count` messages. Returns the manifest so far. Raises TransferFailed."""
        first = self._digest.count
        for number in range(first, min(first + count, len(self.plan))):
            planned = self.plan[number]
            buffer = self._buffer[: planned.size]
            payload = buffer[payload_start(planned.header) :]
            for part in planned.parts:
                part_view(part, payload).copy_(self._memory[part.name][part.slices[0]])
            self._digest.add(
                seal_on_device(
                    buffer,
                    self._host,
                    kind="dense",
                    epoch=self.epoch,
                    version=self.version,
                    stream=0,
                    number=number,
                    header=planned.header,
                )
            )
            work = self._group.send([buffer], self._peer, number)
            polled = buffer.device.type != "cpu"
            if not wait_for(work, self._wait_s, polled=polled):
                raise TransferFailed(f"waited {self._wait_s:g} s for the peer to take message {number} of a copy")
        return self.manifest

    @property
    def done(self) -> bool:
        """Everything was sent."""
        return self._digest.count == len(self.plan)

    @property
    def manifest(self) -> str:
        """Of what was sent so far, by this rank."""
        return manifest_digest({0: self._digest.value})


class CopyTaker:
    """Puts the messages of a copy into the parameters; an `Applier`."""

    def __init__(self, params: Params) -> None:
        self._memory = storages(params)
        self._left = {name: flat.numel() for name, flat in self._memory.items()}

    def apply(self, stream: int, message: Opened[torch.Tensor]) -> None:
        """Raises Refused unless the parts are of this engine's own layout."""
        for part in message.parts:
            flat = self._memory.get(part.name)
            if flat is None or part.shape != tuple(flat.shape) or part.dtype != str(flat.dtype).removeprefix("torch."):
                raise Refused(f"{part.name} of the peer is no parameter of the same size here: the layouts differ")
            flat[part.slices[0]].copy_(part_view(part, message.payload))
            self._left[part.name] -= part.elements

    def check_complete(self) -> None:
        """Raises Refused, naming a parameter that is missing."""
        if absent := [name for name, left in self._left.items() if left]:
            raise Refused(f"some or all of parameter {absent[0]} never came")
