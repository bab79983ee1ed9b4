"""A ring of slots in shared memory: one process writes messages of weights, several on the same machine read each.

    page 0: magic, schema, slots, slot bytes, readers | "called off" | messages written | the cursor of each reader
    then:   the size of each slot's message | (next page) the slots

A message is built and read in its slot: neither side copies it. A slot is written again only when every reader has let
go of it. All numbers are little-endian u64 in cache lines of their own. Readers check each message's digest, so that
a torn slot, which the order of stores rules out on x86, would be refused and not loaded.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from moe_asyncrl.data.errors import DeadlineExceeded, UserError

MAGIC = int.from_bytes(b"MOEWRING", "little")
SCHEMA = 1
LINE = 64
PAGE = 4096
LEFT = 2**64 - 1
"""The cursor of a reader that has gone."""
_FIXED_LINES = 3


class RingError(UserError):
    """The ring is not what was asked for, or the other side has called the transfer off."""


def _data_start(slots: int, readers: int) -> int:
    lines = _FIXED_LINES + readers + slots
    return -(-lines * LINE // PAGE) * PAGE


def _slot_step(slot_bytes: int) -> int:
    return -(-slot_bytes // PAGE) * PAGE


def ring_bytes(slots: int, slot_bytes: int, readers: int) -> int:
    """Size of the whole ring."""
    return _data_start(slots, readers) + slots * _slot_step(slot_bytes)


class _Ring:
    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        # The map is freed when the last view of it is: a message that somebody still holds stays readable.
        self._bytes = torch.from_numpy(np.frombuffer(mmap.mmap(fd, size), np.uint8))
        self._words = self._bytes[: size // 8 * 8].numpy().view("<u8")

    def _word(self, line: int) -> int:
        return int(self._words[line * LINE // 8])

    def _set(self, line: int, value: int) -> None:
        self._words[line * LINE // 8] = value

    def _layout(self, slots: int, slot_bytes: int, readers: int) -> None:
        self.slots, self.slot_bytes, self.readers = slots, slot_bytes, readers

    def _slot(self, message: int, size: int) -> torch.Tensor:
        at = _data_start(self.slots, self.readers) + message % self.slots * _slot_step(self.slot_bytes)
        return self._bytes[at : at + size]

    def _size_line(self, message: int) -> int:
        return _FIXED_LINES + self.readers + message % self.slots

    @property
    def _written(self) -> int:
        return self._word(2)


class RingWriter(_Ring):
    """Makes the ring. `close` it: whoever still waits for a message then hears so."""

    def __init__(self, path: Path, *, slots: int, slot_bytes: int, readers: int) -> None:
        """`path`: a new file, in /dev/shm. Raises RingError if it cannot be made that large."""
        size = ring_bytes(slots, slot_bytes, readers)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as e:
            raise RingError(f"no shared memory for weights: {path}: {e.strerror}") from e
        try:
            # Without the room a write would end the process by a signal.
            os.posix_fallocate(fd, 0, size)
            super().__init__(path, fd, size)
        except OSError as e:
            path.unlink(missing_ok=True)
            raise RingError(
                f"no room for {size} bytes of shared memory at {path}: {e.strerror}; make /dev/shm larger, or "
                "weights.bucket_bytes or weights.depth smaller"
            ) from e
        finally:
            os.close(fd)
        self._layout(slots, slot_bytes, readers)
        self._words[:5] = (MAGIC, SCHEMA, slots, slot_bytes, readers)

    def slot(self, size: int, *, wait_s: float, stop: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """Where to build the next message: uint8 [size], a view. Waits until all readers have let go of it.

        Raises:
            ValueError: larger than a slot.
            DeadlineExceeded: a reader kept it for `wait_s` seconds; the text has the readers' numbers.
            RingError: a reader has left, or `stop` said so.
        """
        if size > self.slot_bytes:
            raise ValueError(f"a message of {size} bytes does not fit a slot of {self.slot_bytes}")
        message = self._written
        waiting: Sequence[int] = ()

        def free() -> bool:
            nonlocal waiting
            cursors = [self._word(_FIXED_LINES + r) for r in range(self.readers)]
            if gone := [r for r, cursor in enumerate(cursors) if cursor == LEFT]:
                raise RingError(f"readers {gone} of {self.path} have left the transfer")
            if stop():
                raise RingError(f"the transfer through {self.path} was called off")
            waiting = [r for r, cursor in enumerate(cursors) if cursor + self.slots <= message]
            return not waiting

        if not poll(free, wait_s):
            raise DeadlineExceeded(f"waited {wait_s:g} s for readers {list(waiting)} of {self.path} to take a message")
        return self._slot(message, size)

    def publish(self, size: int) -> None:
        """The message in the slot is complete."""
        message = self._written
        self._set(self._size_line(message), size)
        self._set(2, message + 1)

    def close(self) -> None:
        """Take the name away, and tell readers that wait that nothing more comes. Idempotent."""
        self._set(1, 1)
        self.path.unlink(missing_ok=True)


class RingReader(_Ring):
    """One reader of a ring that exists. It reads what is written from now on. `close` it."""

    def __init__(self, path: Path, reader: int) -> None:
        """`reader`: which of the ring's readers this is. Raises RingError if it is not there, or not such a ring."""
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as e:
            raise RingError(f"no shared memory for weights at {path}: {e.strerror}") from e
        try:
            size = os.fstat(fd).st_size
            if size < PAGE:
                raise RingError(f"{path} is no ring of messages")
            super().__init__(path, fd, size)
        finally:
            os.close(fd)
        magic, schema, slots, slot_bytes, readers = map(int, self._words[:5])
        if magic != MAGIC or schema != SCHEMA or ring_bytes(slots, slot_bytes, readers) != size:
            raise RingError(f"{path} is no ring of messages of this release")
        if not 0 <= reader < readers:
            raise RingError(f"{path} has {readers} readers; there is no reader {reader}")
        self._layout(slots, slot_bytes, readers)
        self._line = _FIXED_LINES + reader
        self._next = self._written
        self._released = self._next
        self._set(self._line, self._next)

    def take(self, size: int, *, wait_s: float) -> torch.Tensor:
        """The next message: uint8 [size], a view that holds until `release`.

        Raises DeadlineExceeded, or RingError if the writer has closed the ring or the message has another size.
        """
        message = self._next

        def there() -> bool:
            if self._written > message:
                return True
            if self._word(1):
                raise RingError(f"the sender has closed {self.path} before message {message}")
            return False

        if not poll(there, wait_s):
            raise DeadlineExceeded(f"waited {wait_s:g} s for a message in {self.path}")
        found = self._word(self._size_line(message))
        if found != size:
            raise RingError(f"the next message in {self.path} has {found} bytes, {size} were announced")
        self._next = message + 1
        return self._slot(message, size)

    def release(self) -> None:
        """Done with the oldest message that was taken: its slot may be written again."""
        self._released += 1
        self._set(self._line, self._released)

    def close(self) -> None:
        """Leave the transfer: a writer that waits for this reader hears so. Idempotent."""
        self._set(self._line, LEFT)


def poll(done: Callable[[], bool], wait_s: float) -> bool:
    """Ask until `done` or until `wait_s` seconds have passed; at first often, then every millisecond."""
    end = time.monotonic() + wait_s
    pause = 2e-5
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True
