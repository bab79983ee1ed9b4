"""The receiving ends of the transports: each hands out the messages of one rank's schedule, in its order.

`take` waits for the next message, at most the order's `wait_s`, and `release` gives its memory back; up to `depth`
messages are on their way meanwhile. Errors name the sender's rank and the message's number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotThere
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.weights import Prepare, Stream
from moe_asyncrl.weights.message_files import read_message
from moe_asyncrl.weights.ring import RingReader, poll


class TransferFailed(UserError):
    """A message did not come."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of a schedule."""

    stream: Stream
    number: int
    """In its stream."""
    size: int
    """Bytes."""

    def __str__(self) -> str:
        return f"message {self.number} of trainer rank {self.stream.sender} ({self.size} bytes)"


class Source(Protocol):
    """See the module."""

    def take(self) -> tuple[Entry, torch.Tensor]:
        """The next message: uint8 [size], whole, on the engine's device or the host. Raises TransferFailed."""
        ...

    def release(self) -> None:
        """Done with the message that was taken."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


def entries(order: Prepare, rank: int) -> list[Entry]:
    """The schedule of one rank, with each message's number in its stream."""
    schedule = order.schedules[rank if len(order.schedules) > 1 else 0]
    streams = {s.number: s for s in order.streams}
    seen: Counter[int] = Counter()
    found = []
    for number, size in schedule:
        found.append(Entry(streams[number], seen[number], size))
        seen[number] += 1
    return found


class _Buffers:
    """`depth` buffers of the largest message, used in turn."""

    def __init__(self, schedule: Sequence[Entry], depth: int, device: torch.device) -> None:
        self.depth = max(1, min(depth, len(schedule)))
        largest = max((e.size for e in schedule), default=0)
        self._memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(self.depth)]

    def of(self, index: int, size: int) -> torch.Tensor:
        return self._memory[index % self.depth][:size]


class GroupSource:
    """Broadcasts, or point-to-point sends with the message's number as tag, in process groups."""

    def __init__(
        self, order: Prepare, schedule: Sequence[Entry], groups: Mapping[str, Any], device: torch.device, peer: int
    ) -> None:
        """`groups`: by name. `peer`: the sender's rank in the group."""
        self._order, self._schedule, self._groups, self._peer = order, schedule, groups, peer
        self._buffers = _Buffers(schedule, order.depth, device)
        self._works: deque[Any] = deque()
        self._taken = 0
        self._posted = 0
        self._polled = order.transport == "broadcast" or device.type != "cpu"

    def take(self) -> tuple[Entry, torch.Tensor]:
        while self._posted < min(len(self._schedule), self._taken + self._buffers.depth):
            self._works.append(self._post(self._schedule[self._posted], self._posted))
            self._posted += 1
        entry = self._schedule[self._taken]
        work, failed = self._works.popleft(), ""
        try:
            if not wait_for(work, self._order.wait_s, polled=self._polled):
                failed = f"waited {self._order.wait_s:g} s for {entry}"
        except (RuntimeError, dist.DistError) as error:
            failed = f"{entry} did not come: {' '.join(str(error).split())[:200]}"
        # A traceback that somebody keeps would keep the connections open.
        del work
        if failed:
            raise TransferFailed(failed)
        return entry, self._buffers.of(self._taken, entry.size)

    def release(self) -> None:
        self._taken += 1

    def close(self) -> None:
        self._works.clear()

    def _post(self, entry: Entry, index: int) -> Any:
        buffer = self._buffers.of(index, entry.size)
        group = self._groups[entry.stream.channel]
        if self._order.transport == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
            # Longer than our own wait: so the group can be dropped, which waits for what is under way, in bounded time.
            options.timeout = timedelta(seconds=self._order.wait_s + 1)
            return group.broadcast([buffer], options)
        return group.recv([buffer], self._peer, entry.number)


def wait_for(work: Any, wait_s: float, *, polled: bool) -> bool:
    """Wait for work of a process group; False if it was not done in time.

    `polled`: not for point-to-point work of gloo, which only knows that it is done once somebody has waited for it.
    Raises RuntimeError or DistError: the peer is gone (or, where it is not polled, the time was over).
    """
    if not polled:
        work.wait(timedelta(seconds=wait_s))
        return True
    if not poll(work.is_completed, wait_s):
        return False
    work.wait()
    return True


class RingSource:
    """Messages in shared memory, used where they lie."""

    def __init__(self, order: Prepare, schedule: Sequence[Entry], rank: int) -> None:
        self._order, self._schedule, self._taken = order, schedule, 0
        self._rings = {
            s.number: RingReader(Path(s.channel), order.first_reader + rank)
            for s in order.streams
            if any(e.stream.number == s.number for e in schedule)
        }

    def take(self) -> tuple[Entry, torch.Tensor]:
        entry = self._schedule[self._taken]
        try:
            return entry, self._rings[entry.stream.number].take(entry.size, wait_s=self._order.wait_s)
        except UserError as error:
            raise TransferFailed(f"{entry} did not come: {error}") from error

    def release(self) -> None:
        self._rings[self._schedule[self._taken].stream.number].release()
        self._taken += 1

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


class FileSource:
    """Messages as files of a folder, read ahead by threads."""

    def __init__(self, order: Prepare, schedule: Sequence[Entry]) -> None:
        self._order, self._schedule = order, schedule
        self._buffers = _Buffers(schedule, order.depth, torch.device("cpu"))
        self._threads = ThreadPoolExecutor(self._buffers.depth, "weights")
        self._reads: deque[Future[None]] = deque()
        self._taken = 0
        self._posted = 0

    def take(self) -> tuple[Entry, torch.Tensor]:
        while self._posted < min(len(self._schedule), self._taken + self._buffers.depth):
            entry = self._schedule[self._posted]
            buffer = self._buffers.of(self._posted, entry.size)
            folder, number = Path(entry.stream.channel), entry.stream.number
            read = self._threads.submit(read_message, folder, number, entry.number, buffer, wait_s=self._order.wait_s)
            self._reads.append(read)
            self._posted += 1
        entry = self._schedule[self._taken]
        try:
            self._reads.popleft().result(2 * self._order.wait_s)
        except (UserError, NotThere) as error:
            raise TransferFailed(f"{entry} did not come: {error}") from error
        return entry, self._buffers.of(self._taken, entry.size)

    def release(self) -> None:
        self._taken += 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reads.clear()


def open_source(
    order: Prepare, schedule: Sequence[Entry], *, groups: Mapping[str, Any], device: torch.device, rank: int
) -> Source:
    """The receiving end of the order's transport. `rank`: of the engine's ranks. Raises TransferFailed, RingError."""
    if order.transport == "shared_memory":
        return RingSource(order, schedule, rank)
    if order.transport == "disk":
        return FileSource(order, schedule)
    for entry in schedule:
        if entry.stream.channel not in groups:
            raise TransferFailed(f"this engine is not in the process group {entry.stream.channel}")
    return GroupSource(order, schedule, groups, device, rank if order.transport == "copy" else 0)
