"""The account of prompt instances: what may be sampled, what is held, what was trained. No I/O, no clock.

    fresh ─▶ issued ─▶ held ─▶ taken ─▶ consumed
               │         │
               │         └─ stale ──────────────────────────┐
               └─ failed, filtered, unused, vanished, stale ─┴─▶ waiting ─▶ issued (attempt + 1) … else dropped

An instance is the position of a prompt in the run's endless order. Consumed and dropped are ends; the cursor has them.
An instance is sampled anew at most `max_attempts` times, so one that is slow or hard cannot go round for ever; giving
it back unused does not count. Waiting instances are issued before fresh ones, the lowest first.

Room (the rule of AReaL's staleness manager, plus a place in memory for every credit), in groups:

    min( (max_staleness + version + 1) * groups_per_step - (issued + held + taken + consumed),
         capacity - (issued + held) )

`version` is the committed one, `consumed` counts from step 0 of the run. Dropped, filtered and stale groups stand in
none of the sums, so they give their place back. Example: 4 groups a step, staleness 1, version 0: 8 credits. After
step 1 (4 consumed) and before the commit: still 8 - 4 = 4 under way. After the commit of version 1: 12 - 8 = 4 more.

The rule spreads credits; the bound itself is checked where it counts: on arrival, and when a batch is taken.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection
from typing import Literal

import msgspec

from moe_asyncrl.control.state import Rejected
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor

Slot = tuple[int, int]
"""(index, attempt): one credit."""
Fate = Literal["failed", "filtered", "unused", "stale", "vanished"]
_End = Literal["held", "stale", "returned", "vanished", "late"]

REMEMBERED = 8192
"""Credits whose end is remembered, so that a message that comes twice is answered the same."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of the buffer, in groups, versions and times."""

    groups_per_step: int
    max_staleness: int
    max_attempts: int
    capacity: int

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0 or self.max_attempts < 0:
            raise UserError(f"buffer: bounds out of range: {self}")
        if self.capacity < self.groups_per_step:
            raise UserError(
                f"buffer.capacity_groups {self.capacity}: less than one batch ({self.groups_per_step} groups), "
                "the trainer would wait for ever"
            )


@dataclasses.dataclass(frozen=True)
class Entry:
    """One instance that is on its way."""

    index: int
    attempt: int
    """Credits issued for it before; part of the credit's name."""
    retries: int
    """Those of them that count against `max_attempts`."""
    holder: str = ""
    since: float = 0.0
    """When it was issued, in seconds."""
    trajectories: int = 0
    oldest: int = -1
    """Version of its oldest sampled token."""
    arrival: int = 0
    """Order of arrival."""

    @property
    def slot(self) -> Slot:
        """The credit."""
        return self.index, self.attempt


@dataclasses.dataclass(frozen=True)
class Put:
    """What became of a group that arrived. `fresh`: it was not here before, so its frames are to be kept."""

    held: bool
    fresh: bool
    reason: str = ""


def room(limits: Limits, *, issued: int, held: int, taken: int, consumed: int, version: int) -> int:
    """Credits that may be issued now, in groups; the formula of this module's docstring."""
    by_staleness = (limits.max_staleness + version + 1) * limits.groups_per_step - (issued + held + taken + consumed)
    by_memory = limits.capacity - (issued + held)
    return max(0, min(by_staleness, by_memory))


class Ledger:
    """The account itself. Every method either succeeds or raises `Rejected` and changes nothing."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.begin(0, Cursor(), Counters())

    def begin(self, step: int, cursor: Cursor, counters: Counters) -> None:
        """Go on after `step` steps from a checkpoint's cursor and account. Everything on its way is forgotten.

        Whatever is not in the cursor is issued (again). Trajectories that were sampled and neither trained nor
        accounted for went with the buffer's memory; they count as failed, so that the account stays balanced.
        """
        if cursor.watermark < 0 or any(i < cursor.watermark for i in cursor.done):
            raise Rejected("bad_request", f"cursor: instances below the watermark {cursor.watermark} are listed")
        c = counters
        lost = max(0, c.sampled - (c.trained + c.stale + c.filtered + c.failed))
        self.counters = Counters(
            sampled=c.sampled, trained=c.trained, stale=c.stale, filtered=c.filtered, failed=c.failed + lost
        )
        self.steps_done = step
        self.consumed_groups = step * self.limits.groups_per_step
        self.issued: dict[int, Entry] = {}
        self.held: dict[int, Entry] = {}
        self.taken: dict[int, Entry] = {}
        self.waiting: dict[int, Entry] = {}
        self.taken_step: int | None = None
        self._watermark = cursor.watermark
        self._done = set(cursor.done)
        self._next = cursor.watermark
        self._arrivals = 0
        self._ends: OrderedDict[Slot, _End] = OrderedDict()
        self._seen: dict[str, float] = {}
        self._last_result: tuple[Cursor, Counters] | None = None

    # --- samplers ------------------------------------------------------------------------------------------------

    def room(self, version: int) -> int:
        """Credits that may be issued at the committed `version`."""
        return room(
            self.limits,
            issued=len(self.issued),
            held=len(self.held),
            taken=len(self.taken),
            consumed=self.consumed_groups,
            version=version,
        )

    def grant(
        self, sender: str, wanted: int, holding: Collection[Slot], version: int, now: float, *, new: bool = True
    ) -> list[Slot]:
        """Up to `wanted` credits for `sender`: first those that it should have and does not list, then new ones.

        `new=False` grants none, not even the lost ones; they go back as unused.
        """
        lost = sorted(e.slot for e in self.issued.values() if e.holder == sender and e.slot not in holding)
        if not new or version < 0:
            for index, attempt in lost:
                self.give_back(index, attempt, "unused", 0)
            return []
        granted = lost[:wanted]
        for _ in range(min(wanted - len(granted), self.room(version))):
            entry = self._next_entry()
            self.issued[entry.index] = dataclasses.replace(entry, holder=sender, since=now)
            granted.append(entry.slot)
        self._seen[sender] = now
        return granted

    def seen(self, sender: str, now: float) -> None:
        """A sign of life of a sender."""
        if sender in self._seen:
            self._seen[sender] = now

    def expire(self, now: float, silent_s: float) -> list[Slot]:
        """Take back the credits of senders without a sign of life for more than `silent_s` seconds."""
        gone = {s for s, at in self._seen.items() if now - at > silent_s}
        slots = [e.slot for e in self.issued.values() if e.holder in gone]
        for index, attempt in slots:
            self.give_back(index, attempt, "vanished", 0)
        for sender in gone:
            del self._seen[sender]
        return slots

    def put(self, index: int, attempt: int, trajectories: int, oldest: int, failed: int = 0) -> Put:
        """A finished group of `trajectories`, whose oldest sampled token has version `oldest`.

        `failed`: further samples of it, of no use.
        """
        entry = self.issued.get(index)
        if entry is None or entry.attempt != attempt:
            return self._late(index, attempt, trajectories + failed)
        self._count("sampled", failed)
        self._count("failed", failed)
        staleness = self.next_weights - oldest
        if staleness > self.limits.max_staleness:
            self.give_back(index, attempt, "stale", trajectories)
            return Put(False, False, f"stale: {staleness} versions old, the bound is {self.limits.max_staleness}")
        del self.issued[index]
        self._arrivals += 1
        self.held[index] = dataclasses.replace(
            entry, trajectories=trajectories, oldest=oldest, arrival=self._arrivals, holder=""
        )
        self._count("sampled", trajectories)
        self._end(entry.slot, "held")
        return Put(True, True)

    def give_back(self, index: int, attempt: int, fate: Fate, trajectories: int) -> None:
        """The credit was not used up. Unknown and repeated ones change nothing."""
        entry = self.issued.get(index)
        if entry is None or entry.attempt != attempt:
            self._late(index, attempt, trajectories)
            return
        del self.issued[index]
        self._count("sampled", trajectories)
        self._count({"stale": "stale", "filtered": "filtered"}.get(fate, "failed"), trajectories)
        end: dict[Fate, _End] = {"stale": "stale", "vanished": "vanished"}
        self._end(entry.slot, end.get(fate, "returned"))
        self._again_or_drop(entry, counts=fate != "unused")

    # --- trainer -------------------------------------------------------------------------------------------------

    @property
    def next_weights(self) -> int:
        """Version of the weights that the next batch to be taken starts from, at the least."""
        return self.steps_done + (1 if self.taken_step is not None else 0)

    def take(self, step: int, version: int, groups: int) -> list[int] | None:
        """Instances of the batch of `step`, which starts from weights `version`; None if too few are held.

        Never more and never fewer than `groups`; the rest stays held. The oldest tokens go first. Asking again for
        a batch that was not consumed answers the same one.
        """
        if self.taken_step == step:
            return list(self.taken)
        if self.taken_step is not None:
            raise Rejected("bad_request", f"take of step {step}: the batch of step {self.taken_step} is not consumed")
        if step != self.steps_done + 1:
            raise Rejected("bad_request", f"take of step {step}: {self.steps_done} steps are done")
        if not 1 <= groups <= self.limits.capacity:
            raise Rejected("bad_request", f"take of {groups} groups from a buffer of {self.limits.capacity}")
        self._drop_stale(version)
        if len(self.held) < groups:
            return None
        batch = sorted(self.held.values(), key=lambda e: (e.oldest, e.arrival))[:groups]
        for entry in batch:
            self.taken[entry.index] = self.held.pop(entry.index)
        self.taken_step = step
        self._drop_stale(version + 1)
        return [e.index for e in batch]

    def consume(self, step: int) -> tuple[Cursor, Counters]:
        """The batch of `step` is in the weights. The cursor and account that a checkpoint taken now must hold."""
        if step == self.steps_done and self._last_result is not None:
            return self._last_result
        if self.taken_step != step:
            raise Rejected("bad_request", f"step {step} was not taken; taken is {self.taken_step or 'none'}")
        for entry in self.taken.values():
            self._done.add(entry.index)
            self._count("trained", entry.trajectories)
        self.consumed_groups += len(self.taken)
        self.taken = {}
        self.taken_step = None
        self.steps_done = step
        self._advance()
        self._last_result = self.cursor(), self.counters
        return self._last_result

    def cursor(self) -> Cursor:
        """Which instances have come to an end."""
        return Cursor(watermark=self._watermark, done=tuple(sorted(self._done)))

    def kept(self) -> set[int]:
        """Instances whose trajectories are in the buffer."""
        return set(self.held) | set(self.taken)

    # --- inside --------------------------------------------------------------------------------------------------

    def _next_entry(self) -> Entry:
        if self.waiting:
            return self.waiting.pop(min(self.waiting))
        while self._next in self._done:
            self._next += 1
        self._next += 1
        return Entry(index=self._next - 1, attempt=0, retries=0)

    def _again_or_drop(self, entry: Entry, *, counts: bool) -> None:
        retries = entry.retries + (1 if counts else 0)
        if retries > self.limits.max_attempts:
            self._done.add(entry.index)
            self._advance()
        else:
            self.waiting[entry.index] = Entry(index=entry.index, attempt=entry.attempt + 1, retries=retries)

    def _drop_stale(self, version: int) -> None:
        for entry in [e for e in self.held.values() if version - e.oldest > self.limits.max_staleness]:
            del self.held[entry.index]
            self._count("stale", entry.trajectories)
            self._again_or_drop(entry, counts=True)

    def _late(self, index: int, attempt: int, trajectories: int) -> Put:
        """A message about a credit that is not issued (any more)."""
        end = self._ends.get((index, attempt))
        if end == "held":
            return Put(True, False)
        if end == "vanished":
            # Its work was not in the account yet: the sender was thought dead.
            self._count("sampled", trajectories)
            self._count("failed", trajectories)
            self._end((index, attempt), "late")
        return Put(False, False, "the credit is void: " + (end or "never issued or long gone"))

    def _end(self, slot: Slot, end: _End) -> None:
        self._ends[slot] = end
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)

    def _advance(self) -> None:
        while self._watermark in self._done:
            self._done.remove(self._watermark)
            self._watermark += 1
        self._next = max(self._next, self._watermark)

    def _count(self, name: str, n: int) -> None:
        self.counters = msgspec.structs.replace(self.counters, **{name: getattr(self.counters, name) + n})
