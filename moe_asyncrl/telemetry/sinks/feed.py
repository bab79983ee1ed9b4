"""Feeds one sink from `metrics.jsonl`: from where it stood, each step once, and never in the way of the run.

A feed is a thread of its own that only reads the run folder. Where it stands is kept in `sinks/NAME.json`, so that a
start in the middle of a run, or of a resumed one, goes on where the last one stopped.

A resumed run does the steps after its checkpoint again. A sink that can take back what it wrote (`rewind`) then shows
the new ones; one that can only append keeps the old ones.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from moe_asyncrl.telemetry.jsonl import JsonlTail
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic
from moe_asyncrl.telemetry.sinks.points import Point, Points

POLL_S = 1.0
CHUNK = 1 << 20
"""Bytes of metrics that are read at once."""


class Position(msgspec.Struct, kw_only=True):
    """How far a sink got."""

    offset: int = 0
    """Bytes of `metrics.jsonl` that it has."""
    last: dict[str, int] = {}
    """The highest step it has of each group."""
    identity: str = ""
    """What the sink calls this run, if it gives names of its own."""


class Sink(Protocol):
    """Takes points. Every method may raise anything: then the sink is given up, and the run goes on."""

    name: str

    def open(self, position: Position, *, fresh: bool) -> str:
        """Begin, or go on from `position` (`fresh`: nothing of this run was written before). Returns the identity."""
        ...

    def rewind(self, group: str, step: int) -> bool:
        """Take back what was written at `step` and behind it. False if the sink cannot."""
        ...

    def write(self, point: Point) -> None:
        """Take one point."""
        ...

    def flush(self) -> None:
        """All points so far are where they belong when it returns."""
        ...

    def close(self) -> None:
        """No more points will come."""
        ...


class Feed:
    """Brings new points to one sink, each step once. Not a thread itself."""

    def __init__(self, folder: RunFolder, sink: Sink) -> None:
        self._sink = sink
        self._path = folder.path / "sinks" / f"{sink.name}.json"
        found = self._load()
        fresh = found is None
        self._position = found if found is not None else Position()
        self._tail = JsonlTail(folder.metrics_path, offset=self._position.offset)
        self._points = Points()
        self._position.identity = sink.open(self._position, fresh=fresh)

    def step(self) -> bool:
        """Bring what is new, at most about a MiB of metrics. False if there was nothing."""
        before = self._tail.offset
        for record in self._tail.read(CHUNK):
            point = self._points.of(record)
            if point is not None:
                self._bring(point)
        if self._tail.offset == before:
            return False
        self._sink.flush()
        self._position.offset = self._tail.offset
        write_atomic(self._path, msgspec.json.encode(self._position), durable=False)
        return True

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()

    def _bring(self, point: Point) -> None:
        last = self._position.last
        if point.step <= last.get(point.group, -1):
            # Only steps of the run lead back; an evaluation of the same version again is passed over.
            if point.group not in ("train", "warmup") or not self._sink.rewind(point.group, point.step):
                return
            back = ["warmup"] if point.group == "warmup" else ["train", "eval", "probe"]
            last.update({group: min(last[group], point.step - 1) for group in back if group in last})
        self._sink.write(point)
        last[point.group] = point.step

    def _load(self) -> Position | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Position)
        except (OSError, msgspec.MsgspecError):
            return None


class FeedThread:
    """A feed that goes on by itself. What a person should know is left in `messages`."""

    def __init__(self, folder: RunFolder, name: str, make: Callable[[], Sink], *, poll_s: float = POLL_S) -> None:
        """`make` opens the sink, in the thread: importing a library and reaching a server may take long."""
        self._folder, self._name, self._make, self._poll_s = folder, name, make, poll_s
        self._end = threading.Event()
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def messages(self) -> list[str]:
        """What came up since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._messages.get_nowait())
        return found

    def close(self, deadline_s: float) -> list[str]:
        """Bring what is left, for at most `deadline_s` seconds. Returns the last messages."""
        self._end.set()
        self._thread.join(deadline_s)
        late = [f"{self._name}: not all figures were brought there within {deadline_s:g} s"]
        return self.messages() + (late if self._thread.is_alive() else [])

    def _run(self) -> None:
        feed: Feed | None = None
        try:
            feed = Feed(self._folder, self._make())
            while True:
                ending = self._end.wait(self._poll_s)
                while feed.step():
                    pass
                if ending:
                    break
            feed.close()
        except BaseException as error:  # also SystemExit: libraries have been seen to leave that way
            text = " ".join(str(error).split())[:300] or "no message"
            self._messages.put(f"{self._name}: no more figures go there: {type(error).__name__}: {text}")
            if feed is not None:
                with contextlib.suppress(BaseException):
                    feed.close()


class Feeds:
    """All feeds of a run."""

    def __init__(self, threads: list[FeedThread]) -> None:
        self._threads = threads

    def messages(self) -> list[str]:
        """What came up in any of them since the last call."""
        return [line for thread in self._threads for line in thread.messages()]

    def close(self, deadline_s: float) -> list[str]:
        """End them, each within `deadline_s` seconds."""
        lines: list[str] = []
        for thread in self._threads:
            lines += thread.close(deadline_s)
        self._threads = []
        return lines


def plain(value: Any) -> Any:
    """A value as JSON has it, for libraries that take settings."""
    return msgspec.to_builtins(value)
