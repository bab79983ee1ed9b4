"""The trainer's ranks follow the first one, and tell each other what went wrong."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from moe_asyncrl.weights.agree import collective_device

T = TypeVar("T")
REPORT_BYTES = 1024
_ANOTHER = re.compile(r"rank \d+ stopped while the weights were being gathered|failed on rank \d+; see that rank's log")


class Lockstep:
    """Small messages over the trainer's own group. All ranks make the same calls."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = group

    def follow(self, order: T | None, kind: type[T]) -> T:
        """The first rank's `order`, on every rank. The others give None."""
        if self._world_size == 1:
            assert order is not None
            return order
        data = msgspec.msgpack.encode(order) if self._rank == 0 else b""
        size = self._broadcast(torch.tensor([len(data)], dtype=torch.int64))
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self._rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return msgspec.msgpack.decode(self._broadcast(buffer).numpy().tobytes(), type=kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, by rank, on every rank."""
        if self._world_size == 1:
            return [value]
        device = collective_device(self._group)
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=self._group)
        counts = [int(size) for size in sizes]
        mine = torch.zeros(max(counts), dtype=torch.uint8)
        mine[: len(data)] = data
        found = [torch.empty(max(counts), dtype=torch.uint8, device=device) for _ in counts]
        dist.all_gather(found, mine.to(device), group=self._group)
        pairs = zip(found, counts, strict=True)
        return [msgspec.msgpack.decode(row.cpu().numpy().tobytes()[:size], type=kind) for row, size in pairs]

    def first_problem(self, own: str) -> str:
        """Every rank gives its problem ("" for none); the one to report comes back on every rank.

        When one rank stops, the others stop because of it: they name another rank, it does not. So among several
        problems the first one that blames nobody else is the cause.
        """
        if self._world_size == 1:
            return own
        mine = torch.zeros(REPORT_BYTES, dtype=torch.uint8)
        text = own.encode()[:REPORT_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        device = collective_device(self._group)
        found = [torch.empty(REPORT_BYTES, dtype=torch.uint8, device=device) for _ in range(self._world_size)]
        dist.all_gather(found, mine.to(device), group=self._group)
        problems = [_text(row) for row in found]
        return next((p for p in problems if p and not _blames_another(p)), "")

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(collective_device(self._group))
        dist.broadcast(moved, group=self._group, group_src=0)
        return moved.cpu()


def _text(row: torch.Tensor) -> str:
    return row.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _blames_another(problem: str) -> bool:
    return _ANOTHER.search(problem) is not None
