"""One scheduler rank's side of weight updates: commands in, one JSON reply out. See `moe_asyncrl.data.weights`.

Every rank of an engine gets every command, in the same order. What one rank alone can fail in, all agree on before
anything follows from it, so that their states are equal at every command's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from moe_asyncrl.data.errors import StaleEpoch, first_line
from moe_asyncrl.data.weights import CopyOffer, Hold, Memory, Prepare, Progress
from moe_asyncrl.engine.plugin.weights_apply import Applier, Placer
from moe_asyncrl.engine.plugin.weights_copy import CopySender, CopyTaker
from moe_asyncrl.engine.plugin.weights_learn import Known, Learner
from moe_asyncrl.engine.plugin.weights_places import Params
from moe_asyncrl.engine.plugin.weights_sources import Entry, Source, entries, open_source
from moe_asyncrl.engine.plugin.weights_state import Holding, Refused
from moe_asyncrl.weights.message import Opened
from moe_asyncrl.weights.message_device import open_on_device
from moe_asyncrl.weights.stream_digest import StreamDigest, manifest_digest

T = TypeVar("T")
COPY_WAIT_S = 60.0


class Engine(Protocol):
    """What the receiver needs of SGLang's scheduler."""

    rank: int
    ranks: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        ...

    def paused(self) -> bool: ...

    def unfit(self) -> str:
        """Why the engine takes no update at all; empty if it does."""
        ...

    def released(self) -> tuple[Memory, ...]:
        """Memory that was given back."""
        ...

    def cannot_sleep(self) -> str:
        """Why it cannot give its memory back now; empty if it can. Forgets all prefixes."""
        ...

    def release(self) -> None:
        """Give back all memory of weights and cache, with what is in it."""
        ...

    def get_back(self, memory: Memory) -> None: ...

    def params(self) -> Params:
        """Parameters and buffers by name, as they are now."""
        ...

    def load(self, named: Any) -> object:
        """The model's own `load_weights`."""
        ...

    def groups(self) -> dict[str, Any]:
        """Process groups for updates, by name."""
        ...

    def begin(self) -> None:
        """Before the first tensor."""
        ...

    def end(self, *, copied: bool) -> None:
        """After the last one."""
        ...

    def unfit_for_copy(self) -> str:
        """Why its parameters alone are not all of its weights; empty if they are."""
        ...

    def name_version(self, version: int) -> None: ...

    def weights_changed(self, changes: int) -> None:
        """What waits must not use what was computed before."""
        ...

    def answer_all(self, reason: str) -> None:
        """End every request with an error."""
        ...


class _Reply(msgspec.Struct, kw_only=True):
    ok: bool
    kind: str = ""
    message: str = ""
    result: Any = None
    state: str
    version: int


class _RanksFailed(Refused):
    """The message of the first rank that failed."""


class Receiver:
    """See the module."""

    def __init__(self, engine: Engine, version: int) -> None:
        self.holding = Holding(version)
        self._engine = engine
        self._known: Known | None = None
        self._source: Source | None = None
        self._applier: Applier | None = None
        self._schedule: list[Entry] = []
        self._streams: dict[int, StreamDigest] = {}
        self._taken = 0
        self._manifest = ""
        self._host = torch.empty(0, dtype=torch.uint8)
        self._copy: tuple[str, CopySender] | None = None

    def hold(self) -> Hold:
        """What the engine holds."""
        return self.holding.hold(self._engine.paused(), self._engine.released())

    def handle(self, text: str) -> str:
        """Do one command. Returns a JSON reply; nothing is raised."""
        result: Any = None
        kind = message = ""
        try:
            body = msgspec.json.decode(text, type=dict[str, Any])
            do = _COMMANDS.get(str(body.pop("do", "")))
            if do is None:
                raise Refused("unknown command")
            result = do(self, **body)
        except StaleEpoch as error:
            kind, message = "stale_epoch", first_line(error)
        except Exception as error:
            kind, message = "refused", first_line(error)
        reply = _Reply(
            ok=not kind,
            kind=kind,
            message=message,
            result=result,
            state=self.holding.state,
            version=self.holding.version,
        )
        return msgspec.json.encode(reply).decode()

    def changed_elsewhere(self, version: int) -> None:
        """All weights were loaded by one of SGLang's own calls."""
        self.holding.changed_elsewhere(version)
        self._engine.weights_changed(self.holding.changes)

    def changed_in_part(self) -> None:
        """Some weights were loaded by one of SGLang's own calls."""
        self.holding.changed_in_part()
        self._engine.weights_changed(self.holding.changes)

    def spoiled_elsewhere(self, reason: str) -> None:
        """One of SGLang's own calls failed and may have loaded a part."""
        self.holding.spoiled_elsewhere(reason)
        self._engine.answer_all(f"this engine's weights are not whole: {reason}")

    # --- commands -----------------------------------------------------------------------------------------------

    def _hold(self) -> Hold:
        return self.hold()

    def _prepare(self, order: Any) -> None:
        made = msgspec.convert(order, Prepare)
        self.holding.check_order(made, self._engine.ranks)

        def local() -> list[Entry]:
            if why := self._engine.unfit():
                raise Refused(why)
            if made.transport == "copy" and (why := self._engine.unfit_for_copy()):
                raise Refused(why)
            schedule = entries(made, self._engine.rank)
            groups = self._engine.groups()
            if made.transport in ("broadcast", "direct", "copy"):
                for entry in schedule:
                    if entry.stream.channel not in groups:
                        raise Refused(f"this engine is not in the process group {entry.stream.channel}")
            return schedule

        schedule = self._all(local)
        self._drop()
        self.holding.prepare(made)
        self._schedule = schedule
        if made.transport == "shared_memory":
            # The ring's writer counts on every reader from its first message on.
            self._guarded(lambda: self._open(made))

    def _receive(self, update: str, count: int) -> Progress:
        order = self.holding.check_update(update, "prepared", "receiving")
        if not self._engine.paused():
            raise Refused(f"update {update}: the engine has to be paused before weights come")
        self._guarded(lambda: self._take(order, count))
        taken = self._engine.gather((self._taken, len(self._schedule) - self._taken))
        return Progress(received=min(t for t, _ in taken), left=max(n for _, n in taken))

    def _finish(self, update: str) -> str:
        order = self.holding.check_update(update, "prepared", "receiving")

        def local() -> dict[int, str]:
            if self._taken < len(self._schedule) or self._applier is None:
                raise Refused(
                    f"update {update}: {self._taken} of {len(self._schedule)} messages came; the next is "
                    f"{self._schedule[self._taken] if self._schedule else 'none'}"
                )
            self._applier.check_complete()
            self._engine.end(copied=order.transport == "copy")
            if isinstance(self._applier, Learner):
                self._known = self._applier.known()
            return {number: digest.value for number, digest in self._streams.items()}

        self._guarded(local, share=self._share)
        self._drop()
        self.holding.received()
        return self._manifest

    def _commit(self, update: str, version: int, manifest: str, held_as: str = "") -> None:
        self.holding.check_update(update, "received")
        self.holding.commit(version, manifest, self._manifest)
        if held_as:
            self.holding.manifest = held_as
        self._engine.name_version(version)
        self._engine.weights_changed(self.holding.changes)

    def _abandon(self, update: str, reason: str) -> Hold:
        if self.holding.update == update:
            self._fail(f"update {update} was abandoned: {reason}")
        return self.hold()

    def _offer_copy(self, copy: str, group: str, bucket_bytes: int) -> CopyOffer:
        holding = self.holding
        if holding.reason or holding.state not in ("serving", "prepared") or not holding.manifest:
            raise Refused(f"it has no committed weights to copy (it is {holding.state})")

        def local() -> CopySender:
            if why := self._engine.unfit_for_copy():
                raise Refused(why)
            found = self._engine.groups().get(group)
            if found is None:
                raise Refused(f"this engine is not in the process group {group}")
            return CopySender(
                self._engine.params(),
                found,
                peer=self._engine.ranks + self._engine.rank,
                bucket_bytes=bucket_bytes,
                epoch=holding.epoch,
                version=holding.version,
                wait_s=COPY_WAIT_S,
            )

        self._copy = (copy, self._all(local))
        sizes = self._engine.gather([(0, m.size) for m in self._copy[1].plan])
        return CopyOffer(
            epoch=holding.epoch,
            version=holding.version,
            manifest=holding.manifest,
            schedules=tuple(tuple(s) for s in sizes),
        )

    def _send_copy(self, copy: str, count: int) -> str:
        if self._copy is None or self._copy[0] != copy:
            raise Refused(f"there is no copy {copy} to send")
        sender = self._copy[1]

        def local() -> str:
            if (self.holding.epoch, self.holding.version) != (sender.epoch, sender.version) or self.holding.reason:
                raise Refused(f"copy {copy}: the weights have changed since it was offered")
            return sender.send(count)

        try:
            self._all(local)
        except Refused:
            self._copy = None
            raise
        found = self._engine.gather(sender.manifest)
        if sender.done:
            self._copy = None
        return copy_manifest(found)

    def _sleep(self, epoch: int) -> Hold:
        self.holding.check_sleep(epoch)

        def check() -> None:
            if why := self._engine.cannot_sleep():
                raise Refused(why)

        self._all(check)
        self._all(self._engine.release)
        return self.hold()

    def _wake(self, epoch: int, memory: str) -> Hold:
        self.holding.check_epoch(epoch, "an order to wake")
        wanted = msgspec.convert(memory, Memory)
        if wanted not in self._engine.released():
            raise Refused(f"its memory of {wanted} is not given back")
        if wanted == "cache" and self.holding.state != "serving":
            raise Refused(f"its cache comes back after the commit of new weights: {self.holding.reason}")
        self._all(lambda: self._engine.get_back(wanted))
        return self.hold()

    # --- parts of them ------------------------------------------------------------------------------------------

    def _open(self, order: Prepare) -> None:
        self._source = open_source(
            order,
            self._schedule,
            groups=self._engine.groups(),
            device=self._engine.device,
            rank=self._engine.rank,
        )

    def _take(self, order: Prepare, count: int) -> None:
        if self._source is None:
            self._open(order)
        source = self._source
        assert source is not None
        for _ in range(min(count, len(self._schedule) - self._taken)):
            entry, buffer = source.take()
            message = self._opened(order, entry, buffer)
            if self._applier is None:
                self.holding.first_byte()
                self._applier = self._start(order)
            self._applier.apply(entry.stream.number, message)
            del message, buffer
            source.release()
            self._taken += 1

    def _opened(self, order: Prepare, entry: Entry, buffer: torch.Tensor) -> Opened[torch.Tensor]:
        if buffer.device.type != "cpu" and len(self._host) < entry.size:
            self._host = torch.empty(max(e.size for e in self._schedule), dtype=torch.uint8, pin_memory=True)
        message = open_on_device(
            buffer,
            self._host if buffer.device.type != "cpu" else buffer,
            epoch=order.epoch,
            version=order.version,
            stream=entry.stream.number,
            number=entry.number,
            sender=entry.stream.sender,
        )
        self._streams.setdefault(entry.stream.number, StreamDigest()).add(message.digest)
        if message.kind == "sparse" and buffer.device.type != "cpu":
            payload = self._host[entry.size - len(message.payload) : entry.size]
            message = Opened(message.kind, message.parts, payload, message.digest)
        return message

    def _start(self, order: Prepare) -> Applier:
        if order.transport == "copy":
            return CopyTaker(self._engine.params())
        self._engine.begin()
        if self._known is None:
            return Learner(self._engine.load, self._engine.params)
        return Placer(self._known, self._engine.load, self._engine.params(), sparse=order.base is not None)

    def _share(self, found: Sequence[dict[int, str]]) -> None:
        """The manifest of all ranks' streams; and what the ranks together can take from now on."""
        order = self.holding.order
        if order is not None and order.transport == "copy":
            self._manifest = copy_manifest([manifest_digest(streams) for streams in found])
            return
        together: dict[int, str] = {}
        for rank, streams in enumerate(found):
            for number, value in streams.items():
                if together.setdefault(number, value) != value:
                    raise Refused(f"rank {rank} got other messages in stream {number} than the ranks before it")
        self._manifest = manifest_digest(together)
        loader = sorted(set[str]().union(*self._engine.gather(sorted(self._known.loader) if self._known else [])))
        self.holding.whole_only = f"{loader[0]} goes through the loader" if loader else ""

    def _all(self, local: Callable[[], T]) -> T:
        """Do something on every rank. Raises on every rank if it fails on one."""
        value, failure = _try(local)
        failures = self._engine.gather(failure)
        if any(failures):
            rank = next(i for i, f in enumerate(failures) if f)
            where = f"rank {rank}: " if self._engine.ranks > 1 else ""
            raise _RanksFailed(where + failures[rank])
        return value  # type: ignore[return-value]

    def _guarded(self, local: Callable[[], T], share: Callable[[Sequence[T]], None] | None = None) -> None:
        """A step of an update on every rank, of which a failure ends the update."""
        try:
            value = self._all(local)
            if share is not None:
                share(self._engine.gather(value))
        except Refused as error:
            # One rank may have begun to write where another got nothing.
            if any(self._engine.gather(self.holding.state == "receiving")) and self.holding.state == "prepared":
                self.holding.first_byte()
            self._fail(first_line(error))
            raise

    def _fail(self, reason: str) -> None:
        self._drop()
        self.holding.fail(reason)
        if self.holding.state == "broken":
            self._engine.answer_all(f"this engine's weights are not whole: {self.holding.reason}")

    def _drop(self) -> None:
        """Forget the transfer."""
        if self._source is not None:
            self._source.close()
        self._source = self._applier = None
        self._schedule, self._streams, self._taken = [], {}, 0
        self._host = torch.empty(0, dtype=torch.uint8)


def copy_manifest(ranks: Sequence[str]) -> str:
    """One digest for a copy: over the ranks' own."""
    return manifest_digest(dict(enumerate(ranks)))


def _try(local: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return local(), ""
    except Exception as error:
        return None, first_line(error)


_COMMANDS: dict[str, Callable[..., Any]] = {
    "hold": Receiver._hold,
    "prepare": Receiver._prepare,
    "receive": Receiver._receive,
    "finish": Receiver._finish,
    "commit": Receiver._commit,
    "abandon": Receiver._abandon,
    "offer_copy": Receiver._offer_copy,
    "send_copy": Receiver._send_copy,
    "sleep": Receiver._sleep,
    "wake": Receiver._wake,
}
