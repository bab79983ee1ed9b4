"""What a trainer and an engine say to each other during a weight update: the bodies of the plugin's route.

One update of one engine, in order: `prepare`, (pause), `receive` until every message of the schedule came, `finish`,
`commit`, (resume). `abandon` ends one early. See docs/weights.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Transport = Literal["broadcast", "direct", "disk", "shared_memory", "copy"]
State = Literal["serving", "prepared", "receiving", "received", "broken", "asleep"]
Memory = Literal["weights", "cache"]
"""What an engine gives back when it sleeps, and gets again in this order."""
ROUTE = "/moe_asyncrl/weights"


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that both sides hold, which a delta changes."""

    version: int
    manifest: str


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The ordered messages of one sender to one set of engine ranks."""

    number: int
    """Unique in the update; stands in each message."""
    sender: int
    """Trainer rank, for messages to people."""
    channel: str
    """broadcast, direct, copy: the process group's name, in which the sender is rank 0 (copy: the peer's rank).
    disk: the folder of the update. shared_memory: the path of the ring."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True):
    """What will come. Nothing is touched by it."""

    update: str
    """Names the update in every later call; never used before."""
    epoch: int
    version: int
    base: Base | None = None
    """None: all weights, whole. Else only what changed since then."""
    transport: Transport
    streams: tuple[Stream, ...]
    schedules: tuple[tuple[tuple[int, int], ...], ...]
    """(stream, bytes of the whole message), in the order of arrival: one schedule for all ranks of the engine, or one
    a rank."""
    first_reader: int = 0
    """shared_memory: the ring's reader number of the engine's rank 0; rank r reads as `first_reader + r`."""
    depth: int = 2
    """Receives in flight."""
    wait_s: float = 60.0
    """The longest wait for one message, in seconds."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds. Also under `moe_asyncrl_weights` in each internal state of `/server_info`."""

    state: State
    version: int
    """Of the last commit (or of the start); while `broken`, of what was lost."""
    manifest: str
    """Of the last commit; empty if the weights came by another way."""
    epoch: int
    """The newest that it has seen; -1 before the first."""
    update: str
    """The update that is under way; else empty."""
    reason: str
    """Why it is broken; else empty."""
    paused: bool
    whole_only: str
    """Why it takes neither slices (`direct`) nor deltas; empty if it takes them."""
    released: tuple[Memory, ...] = ()
    """Memory that it has given back."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `receive`."""

    received: int
    """Messages of the schedule so far, on the rank that has the fewest."""
    left: int
    """On the rank that has the most to come."""


class CopyOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine would send to a peer of the same layout."""

    epoch: int
    version: int
    manifest: str
    schedules: tuple[tuple[tuple[int, int], ...], ...]
    """As in `Prepare`, one a rank; all in stream 0."""
