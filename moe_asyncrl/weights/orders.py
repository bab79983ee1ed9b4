"""What the first trainer rank has all ranks do during an update, one order after the other, and what they answer.

    plan ─▶ connect (once a sender, when groups change) ─▶ announce ─▶ open ─▶ send ─▶ settle        drop: after a failure

Every rank carries out every order and all answers go to all ranks, so nobody is ever in a step that another one has
given up.
"""

from __future__ import annotations

from typing import Annotated

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
    """Say which messages there will be. With a base, encode what changed since then."""

    base: int | None
    """Version; None: all weights, whole."""


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


AnyOrder = MakePlan | Connect | Announce | Open | Send | Settle | Drop | Wait


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
    """`Announce` with a base: bytes of this rank's share of a full update."""
