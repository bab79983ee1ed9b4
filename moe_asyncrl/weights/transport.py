"""How a sender's messages reach engines: one small interface, and what waits behind it.

    room ─▶ (build the message there) ─▶ send ─▶ room … ─▶ drain ─▶ close

`room` gives the memory that a message is built in, so that no transport needs a copy of it. It waits until at most
`depth` messages are on their way; every wait has a deadline and ends early when the stop sign is up.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.weights.letters import Letter
from moe_asyncrl.weights.message_files import FolderError, FolderWriter
from moe_asyncrl.weights.ring import RingError, RingWriter

LOOK_S = 0.05
"""Between two looks at the stop sign."""
POLL_S = 0.002

Stop = Callable[[], bool]


class SendFailed(UserError):
    """Messages do not get through to engines; the weights are still here, and another attempt may succeed."""


class Sender(Protocol):
    """The messages of one rank in one update. All calls but `close` raise SendFailed."""

    def room(self, stream: int, nbytes: int) -> torch.Tensor:
        """Memory for the next message of a stream: uint8 [nbytes]. `send` it before the next call."""
        ...

    def send(self, stream: int, number: int, message: torch.Tensor) -> None:
        """Begin to send the sealed message that lies in the last `room`."""
        ...

    def drain(self) -> None:
        """Wait until everything is out of this rank's hands."""
        ...

    def close(self, *, failed: bool) -> None:
        """Let go of what this update alone has. `failed`: engines that still wait shall hear so."""
        ...


@dataclass(frozen=True)
class Waits:
    """What bounds every wait of a transfer."""

    timeout_s: float
    stop: Stop

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Poll. Raises SendFailed at the deadline, or when the sign is up."""
        began = looked = time.monotonic()
        pause = 0.0001
        while not done():
            now = time.monotonic()
            if now - began > self.timeout_s:
                raise SendFailed(f"waited {self.timeout_s:g} s for {what}")
            if now - looked > LOOK_S:
                looked = now
                if self.stop():
                    raise SendFailed(f"called off while waiting for {what}")
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_S)


@dataclass(frozen=True)
class Link:
    """One stream's way into a process group in which this rank is 0."""

    process_group: Any
    group: str
    to: tuple[int, ...] | None
    """Ranks of the group that receive by themselves; None: a broadcast to all."""


class GroupSender:
    """Broadcasts and point-to-point sends. Buffers are kept from message to message: `depth` of them."""

    def __init__(self, links: Mapping[int, Link], *, depth: int, largest: int, device: torch.device, waits: Waits):
        """`largest`: bytes of the largest message."""
        self._links = links
        self._depth = depth
        self._waits = waits
        self._free = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(depth)]
        self._on_the_way: deque[tuple[Callable[[], bool], list[Any], torch.Tensor, str]] = deque()
        self._current: torch.Tensor | None = None
        self._waiter = ThreadPoolExecutor(1, "weights-send")

    def room(self, stream: int, nbytes: int) -> torch.Tensor:
        while self._on_the_way and (not self._free or self._on_the_way[0][0]()):
            self._settle_oldest()
        self._current = self._free.pop()
        return self._current[:nbytes]

    def send(self, stream: int, number: int, message: torch.Tensor) -> None:
        if self._current is None:
            raise ValueError("send without room")
        link = self._links[stream]
        what = f"engines to take message {number} of stream {stream} (group {link.group})"
        buffer, self._current = self._current, None
        works, reason = [], ""
        try:
            works = _start(link, message, number)
        except (RuntimeError, dist.DistError) as error:
            reason = _brief(error)
        if reason:
            raise SendFailed(f"{what}: {reason}")
        if link.to is None or message.is_cuda:
            # The first NCCL collective of a group ends when every rank is there; its thread does not wait here.
            self._on_the_way.append((lambda: all(w.is_completed() for w in works), works, buffer, what))
            return
        # Point-to-point work of gloo only knows that it is done once somebody has waited for it.
        limit = timedelta(seconds=self._waits.timeout_s)
        waits = [self._waiter.submit(w.wait, limit) for w in works]
        self._on_the_way.append((lambda: all(w.done() for w in waits), waits, buffer, what))

    def drain(self) -> None:
        while self._on_the_way:
            self._settle_oldest()

    def close(self, *, failed: bool) -> None:
        self._on_the_way.clear()
        self._free.clear()
        self._links = {}
        self._waiter.shutdown(wait=False, cancel_futures=True)

    def _settle_oldest(self) -> None:
        done, works, buffer, what = self._on_the_way[0]
        self._waits.until(done, what)
        reason = ""
        try:
            for work in works:
                if isinstance(work, Future):
                    work.result()
                else:
                    work.wait()
        except (RuntimeError, dist.DistError) as error:
            # Not the error itself: its traceback would keep the connections open, which engines take for life.
            reason = _brief(error)
        self._on_the_way.popleft()
        self._free.append(buffer)
        if reason:
            raise SendFailed(f"{what}: {reason}")


def _start(link: Link, message: torch.Tensor, number: int) -> list[Any]:
    if link.to is not None:
        return [link.process_group.send([message], rank, number) for rank in link.to]
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    return [link.process_group.broadcast([message], options)]


class FolderSender:
    """Files of a folder, written beside the work on the next message."""

    def __init__(self, folder: Path, letters: Sequence[Letter], *, depth: int, largest: int, waits: Waits) -> None:
        """`letters`: what is to be sent."""
        self._unsent = {(letter.stream, letter.number) for letter in letters}
        self._writer = FolderWriter(folder)
        self._free = [torch.empty(largest, dtype=torch.uint8) for _ in range(depth)]
        self._writing: deque[tuple[Future[None], torch.Tensor, str]] = deque()
        self._waits = waits
        self._current: torch.Tensor | None = None
        self._threads = ThreadPoolExecutor(depth, "weights-write")

    def room(self, stream: int, nbytes: int) -> torch.Tensor:
        while self._writing and (not self._free or self._writing[0][0].done()):
            self._settle_oldest()
        self._current = self._free.pop()
        return self._current[:nbytes]

    def send(self, stream: int, number: int, message: torch.Tensor) -> None:
        if self._current is None:
            raise ValueError("send without room")
        what = f"the disk to take message {number} of stream {stream} in {self._writer.folder}"
        self._unsent.discard((stream, number))
        self._writing.append((self._threads.submit(self._writer.put, stream, number, message), self._current, what))
        self._current = None

    def drain(self) -> None:
        while self._writing:
            self._settle_oldest()

    def close(self, *, failed: bool) -> None:
        if failed:
            # Whoever waits for one of these finds an empty file, which is no message.
            with contextlib.suppress(FolderError):
                for stream, number in sorted(self._unsent):
                    self._writer.put(stream, number, torch.empty(0, dtype=torch.uint8))
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._free.clear()

    def _settle_oldest(self) -> None:
        future, buffer, what = self._writing.popleft()
        self._waits.until(future.done, what)
        # A full disk is nobody's fault but the run's: it is not a SendFailed.
        future.result()
        self._free.append(buffer)


class RingSender:
    """Rings in shared memory, one for each stream: a message is built in the slot that engines read."""

    def __init__(self, rings: Mapping[int, RingWriter], waits: Waits) -> None:
        self._rings = rings
        self._waits = waits

    def room(self, stream: int, nbytes: int) -> torch.Tensor:
        try:
            return self._rings[stream].slot(nbytes, wait_s=self._waits.timeout_s, stop=self._waits.stop)
        except (RingError, DeadlineExceeded) as error:
            raise SendFailed(str(error)) from error

    def send(self, stream: int, number: int, message: torch.Tensor) -> None:
        self._rings[stream].publish(len(message))

    def drain(self) -> None:
        """What lies in the ring is out of this rank's hands."""

    def close(self, *, failed: bool) -> None:
        for ring in self._rings.values():
            ring.close()


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
