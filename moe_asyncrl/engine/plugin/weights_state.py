"""Which weights an engine holds, and which step of an update may come next. Pure: every rank keeps one, all equal.

    serving ─prepare▶ prepared ─first byte▶ receiving ─all came▶ received ─commit▶ serving
    prepared ─abandon, prepare▶ serving, prepared       receiving, received ─any failure, abandon▶ broken
    broken ─prepare, with all weights▶ prepared (and back to broken when that is abandoned)
    serving ─sleep▶ asleep ─prepare, with all weights▶ prepared (and back to asleep)

Only `serving` and `prepared` may generate, and not while broken weights are underneath (`sound`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from moe_asyncrl.data.errors import StaleEpoch, UserError
from moe_asyncrl.data.weights import Hold, Memory, Prepare, State


class Refused(UserError):
    """The engine will not do this. The text says why."""


@dataclass
class Holding:
    """See the module."""

    version: int
    manifest: str = ""
    epoch: int = -1
    state: State = "serving"
    reason: str = ""
    """Why the weights underneath are not whole; empty if they are."""
    order: Prepare | None = None
    """The update under way."""
    changes: int = 0
    """How often the weights changed: keys of the prefix cache are made of it."""
    whole_only: str = "its places of tensors are not known before a first update with all weights"
    asleep: bool = False
    """It has given its weights' memory back, and nothing has been written there since."""
    done: deque[str] = field(default_factory=lambda: deque(maxlen=16))
    """Names of the last updates that are over: they never come again."""

    @property
    def sound(self) -> bool:
        """It may generate."""
        return self.state in ("serving", "prepared") and not self.reason

    @property
    def update(self) -> str:
        """The update under way; else empty."""
        return self.order.update if self.order is not None else ""

    def hold(self, paused: bool, released: tuple[Memory, ...] = ()) -> Hold:
        """What it says of itself."""
        return Hold(
            state=self.state,
            version=self.version,
            manifest=self.manifest,
            epoch=self.epoch,
            update=self.update,
            reason=self.reason,
            paused=paused,
            whole_only=self.whole_only,
            released=released,
        )

    def check_order(self, order: Prepare, ranks: int) -> None:
        """Raises StaleEpoch, or Refused with the reason, unless `order` may be prepared."""
        self.check_epoch(order.epoch, f"update {order.update}")
        if self.state in ("receiving", "received"):
            raise Refused(
                f"update {self.update} is under way ({self.state}); update {order.update} cannot begin before it is "
                "committed or abandoned"
            )
        if order.update in self.done or order.update == self.update:
            raise Refused(f"there was an update {order.update} already: each needs a name of its own")
        # A trainer that was restarted from a checkpoint may go back, with the epoch of its own.
        rises = order.version > self.version or (order.version == self.version and bool(self.reason))
        if not rises and order.epoch == self.epoch:
            raise Refused(f"version {order.version} does not rise: this engine holds version {self.version}")
        if order.base is not None:
            if self.reason:
                raise Refused(f"it needs all weights, not changes: {self.reason}")
            if (order.base.version, order.base.manifest) != (self.version, self.manifest) or not self.manifest:
                raise Refused(
                    f"the changes are to version {order.base.version} with manifest {order.base.manifest}; this engine "
                    f"holds version {self.version} with manifest {self.manifest or 'unknown'}"
                )
        if self.whole_only and (order.base is not None or order.transport == "direct"):
            what = "changes" if order.base is not None else "slices"
            raise Refused(f"it takes whole tensors only, not {what}: {self.whole_only}")
        if len(order.schedules) not in (1, ranks):
            raise Refused(f"{len(order.schedules)} schedules came for {ranks} ranks")
        known = {s.number for s in order.streams}
        for stream, size in (entry for schedule in order.schedules for entry in schedule):
            if stream not in known or size <= 0:
                raise Refused(f"the schedule has a message of {size} bytes in stream {stream}, which was not announced")

    def prepare(self, order: Prepare) -> None:
        """After `check_order` on every rank."""
        self.order, self.epoch, self.state = order, order.epoch, "prepared"

    def check_update(self, update: str, *states: State) -> Prepare:
        """The update under way. Raises Refused unless it is `update`, in one of `states`."""
        if self.order is None or self.order.update != update:
            why = f"update {self.update} is" if self.order is not None else "no update is"
            broken = f" (broken: {self.reason})" if self.reason else ""
            raise Refused(f"{why} under way here, not {update}{broken}")
        if self.state not in states:
            raise Refused(f"update {update} is {self.state}, not {' or '.join(states)}")
        return self.order

    def first_byte(self) -> None:
        """From here on the weights are of no version."""
        self.state = "receiving"
        if self.asleep or not self.reason:
            self.reason = f"update {self.update} to version {self._order.version} was not committed"
        self.asleep = False
        self.changes += 1

    def received(self) -> None:
        """Everything came and is in place."""
        self.state = "received"

    def commit(self, version: int, manifest: str, received: str) -> None:
        """Serve. Raises Refused unless `manifest` is what was `received` and `version` what was announced."""
        if version != self._order.version or manifest != received:
            raise Refused(
                f"update {self.update} cannot be committed as version {version} with manifest {manifest}: version "
                f"{self._order.version} with manifest {received} was received"
            )
        self.version, self.manifest, self.reason = version, manifest, ""
        self._over("serving")

    def fail(self, reason: str) -> None:
        """End the update. After its first byte, or on weights that were broken before, the engine is broken."""
        if self.state in ("receiving", "received"):
            self.reason = reason
        self._over("asleep" if self.asleep else "broken" if self.reason else "serving")

    def changed_elsewhere(self, version: int) -> None:
        """All weights were loaded by one of SGLang's own calls."""
        self.version, self.manifest, self.reason, self.state, self.asleep = version, "", "", "serving", False
        self.changes += 1

    def changed_in_part(self) -> None:
        """Some weights were loaded by one of SGLang's own calls: they have no manifest any more."""
        self.manifest = ""
        self.changes += 1

    def spoiled_elsewhere(self, reason: str) -> None:
        """One of SGLang's own calls failed and may have loaded a part."""
        self.reason, self.state = reason, "broken"
        self.changes += 1

    def check_sleep(self, epoch: int) -> None:
        """Raises StaleEpoch, or Refused with the reason, unless it may sleep."""
        self.check_epoch(epoch, "an order to sleep")
        if self.order is not None or self.reason:
            raise Refused(f"it cannot sleep: it is {self.state}{f', {self.reason}' if self.reason else ''}")

    def check_epoch(self, epoch: int, what: str) -> None:
        """Raises StaleEpoch for an epoch that is over."""
        if epoch < self.epoch:
            raise StaleEpoch(
                f"{what} has epoch {epoch}, and this engine has seen epoch {self.epoch}: another trainer owns the run "
                "now"
            )

    def fall_asleep(self) -> None:
        """The memory of the weights is gone, with what was in it."""
        self.state, self.asleep = "asleep", True
        self.reason = f"it sleeps, and its memory of version {self.version} is given back"
        self.changes += 1

    @property
    def _order(self) -> Prepare:
        if self.order is None:
            raise Refused("no update is under way")
        return self.order

    def _over(self, state: State) -> None:
        self.done.append(self.update)
        self.order, self.state = None, state
