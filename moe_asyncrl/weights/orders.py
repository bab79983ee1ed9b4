"""What the first trainer rank has all ranks do during an update, one order after the other, and what they answer.

    plan ─▶ connect (for each sender, when groups change) ─▶ announce ─▶ open ─▶ send ─▶ settle
    drop: after a failure; done, stopped, failed: the last one

Every rank carries out every order and all answers go to all ranks, so nobody is ever in a step that another one has
given up.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moe_asyncrl.data.weights import Transport
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.group import Rendezvous
from moe_asyncrl.weights.letters import Letter
from moe_asyncrl.weights.plan import Mode


class Order(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all orders."""


class MakePlan(Order, frozen=True, kw_only=True):
    """Plan for these engines. Nothing changes if the plan at hand is for them."""

    mode: Mode
    engines: tuple[EngineLayout, ...]


class Connect(Order, frozen=True, kw_only=True):
    """The sender joins a group; nobody else does anything."""

    sender: int
    at: Rendezvous


class Announce(Order, frozen=True, kw_only=True):
    """Say which messages there will be."""

    version: int
    changes: bool
    """Encode what changed since the last committed version; else all weights come, whole."""


class Open(Order, frozen=True, kw_only=True):
    """Get ready to send: make rings and folders, before engines are told of them."""

    update: str
    transport: Transport
    place: str
    """disk: the folder of the update. shared_memory: what the paths of rings begin with. Else empty."""
    readers: int
    """Engine ranks, counted through all engines."""
    depth: int


class Send(Order, frozen=True, kw_only=True):
    """Send what was announced."""

    update: str
    epoch: Annotated[int, Meta(ge=0)]
    version: int


class Settle(Order, frozen=True, kw_only=True):
    """The update is over."""

    version: int | None
    """What engines have committed; None if it failed: what was kept of it is no base."""


class Drop(Order, frozen=True, kw_only=True):
    """Leave all groups."""


class Wait(Order, frozen=True, kw_only=True):
    """Nothing yet."""


class Resting(Order, frozen=True, kw_only=True):
    """Colocated: it is the trainer's turn."""


class Done(Order, frozen=True, kw_only=True):
    """The update is committed."""

    report: dict[str, Any]


class Stopped(Order, frozen=True, kw_only=True):
    """The run is to stop; nothing was committed."""


class Failed(Order, frozen=True, kw_only=True):
    """The update is given up."""

    reason: str


class SignAt(msgspec.Struct, frozen=True, kw_only=True):
    """Port of the first rank's stop sign."""

    port: int


AnyOrder = MakePlan | Connect | Announce | Open | Send | Settle | Drop | Wait | Resting | Done | Stopped | Failed


class Ordered(msgspec.Struct, frozen=True):
    """An order on its way to the other ranks."""

    order: AnyOrder


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank to one order."""

    problem: str = ""
    """What went wrong for good; empty if nothing did."""
    failed: str = ""
    """What went wrong with engines or the way to them: another attempt may succeed."""
    letters: tuple[Letter, ...] = ()
    """`Announce`."""
    digests: dict[int, str] = {}
    """`Send`: `StreamDigest.value` of the rank's streams."""
    whole_bytes: int = 0
    """`Announce`: bytes of this rank's messages in a full update."""
    too_much: bool = False
    """`Announce`: this rank has no changes to send that are worth it; the update has to be a full one."""
    changed: int = 0
    """`Announce`: elements with other bits than before, in the pieces that this rank gives."""
    elements: int = 0
    """`Announce`: all elements of those pieces."""
