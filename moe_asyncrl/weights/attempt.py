"""One attempt at an update, led by the trainer's first rank.

    survey, plan, groups, announce, open, prepare │ pause ─▶ transfer ─▶ finish ─▶ commit │ (the caller resumes)

Whatever can be done before the pause is done before it. The result says who has committed what; every failure of
engines is an EnginesFailed, after which the caller calls `recover` and tries again with whom is left.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from moe_asyncrl.data.errors import StaleEpoch, UserError
from moe_asyncrl.data.protocols import EngineControl
from moe_asyncrl.data.weights import Base, Hold, Memory, Prepare, Stream, Transport
from moe_asyncrl.weights.backend import Transport as Backend
from moe_asyncrl.weights.changes import ROOM
from moe_asyncrl.weights.channels import Channels, Command
from moe_asyncrl.weights.engine_layout import EngineLayout
from moe_asyncrl.weights.engines_side import EnginesSide
from moe_asyncrl.weights.failure import EnginesFailed, raise_if_any
from moe_asyncrl.weights.letters import sizes, total_bytes
from moe_asyncrl.weights.loop_thread import LoopThread
from moe_asyncrl.weights.message_files import FolderWriter, Index, folder_name, prune
from moe_asyncrl.weights.orders import Announce, Answer, Drop, MakePlan, Open, Send
from moe_asyncrl.weights.rank_side import RankSide, ring_path
from moe_asyncrl.weights.stop_sign import StopSign
from moe_asyncrl.weights.stream_digest import manifest_digest
from moe_asyncrl.weights.work import schedule, streams_to

BLAME_S = 3.0
"""How long a failed transfer waits for an engine's own account of it."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How weights travel; from the recipe."""

    transport: Transport
    backend: Backend
    depth: int
    timeout_s: float
    pause_mode: str
    max_fraction: float
    """Changes that take more than this of a full update's bytes are sent as a full one."""
    folder: str
    """disk: where the folders of updates lie. shared_memory: where rings lie."""


@dataclass(kw_only=True)
class Held:
    """What engines hold of the last committed update, as the sender knows it."""

    version: int | None = None
    """None: no update that changes could be made to."""
    manifests: dict[str, str] = field(default_factory=dict)
    """By engine."""

    def base_of(self, name: str, held: Hold) -> Base | None:
        """The base of changes for an engine; None if it needs all weights."""
        manifest = self.manifests.get(name)
        if self.version is None or not manifest or held.state not in ("serving", "prepared") or held.whole_only:
            return None
        if (held.version, held.manifest) != (self.version, manifest):
            return None
        return Base(version=self.version, manifest=manifest)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What an attempt has come to, once engines have committed."""

    update: str
    manifests: dict[str, str]
    lost: dict[str, str]
    """Engines that failed at the commit."""
    transport: Transport
    delta: bool
    bytes: int
    """Of all messages, once."""
    messages: int
    whole_bytes: int
    """Of the messages of a full update."""
    changed: float
    """Fraction of the elements whose bits have changed; 1 if the update was a full one."""
    paused_at: float
    """Unix time."""
    index: Index | None
    """disk: of the folder."""


class Attempt:
    """Made for one attempt; `run` it once."""

    def __init__(
        self,
        engines: Sequence[EngineControl],
        layouts: Sequence[EngineLayout],
        ways: Ways,
        *,
        loop: LoopThread,
        command: Command,
        side: RankSide,
        stop: StopSign | None,
        channels: Channels,
        epoch: int,
        version: int,
        watch: Callable[[str], None],
    ) -> None:
        """`side`: of this rank. `stop`: None where the trainer has one rank and the sign is not needed."""
        self._names = [e.name for e in engines]
        self._all = tuple(engines)
        self._layouts = tuple(layouts)
        self._ways = ways
        self._loop, self._command, self._side, self._stop = loop, command, side, stop
        self._channels = channels
        self._epoch, self._version = epoch, version
        self._watch = watch
        self.update = uuid.uuid4().hex[:12]
        self.engines = EnginesSide(engines, update=self.update, timeout_s=ways.timeout_s)
        self.paused_at: float | None = None
        self.delta = False
        self.transport: Transport = ways.transport

    def run(self, held: Held, *, changes: bool, slices: bool) -> Sent:
        """The attempt. `changes`, `slices`: whether engines may be asked to take these.

        Raises:
            EnginesFailed: call `recover`.
            UserError: no attempt can succeed.
        """
        try:
            return self._run(held, changes=changes, slices=slices)
        except StaleEpoch as error:
            raise UserError(str(error)) from error

    def recover(self, cause: EnginesFailed, *, resume: bool = False) -> dict[str, str]:
        """Free the engines that are not at fault; those at fault, with reasons. See `EnginesSide.recover`."""
        try:
            # It takes all ranks; without one of them the groups go with the processes.
            with contextlib.suppress(Exception):
                self._channels.abandon()
            self._side.do(Drop())
            lost = self._loop.call(self.engines.recover(cause, resume=resume))
            self._channels.leave([e for e in self._all if e.name not in lost])
            return lost
        finally:
            if self._stop is not None:
                self._stop.take_down(self.update)

    def _run(self, held: Held, *, changes: bool, slices: bool) -> Sent:
        self._watch("survey")
        holds = self._loop.call(self.engines.survey(self._epoch))
        raise_if_any(self._wake(holds, "weights"))
        if self.transport == "direct" and (not slices or any(h.whole_only for h in holds.values())):
            self.transport = "broadcast"
        self._command(MakePlan(mode="direct" if self.transport == "direct" else "broadcast", engines=self._layouts))
        plan = self._side.plan
        assert plan is not None
        channels: Mapping[int, str] = {}
        if self.transport in ("broadcast", "direct"):
            channels = self._channels.ensure(plan, self._all, self._ways.backend)
        bases = {name: held.base_of(name, holds[name]) for name in self._names}
        self.delta = changes and all(base is not None for base in bases.values())
        answers = self._announce()
        letters = self._side.letters
        place = self._open_place()
        readers = int(plan.engine_starts[-1])
        depth = self._ways.depth
        self._command(Open(update=self.update, transport=self.transport, place=place, readers=readers, depth=depth))
        self._watch("prepare")
        orders = {
            name: self._order(number, channels, place, bases[name] if self.delta else None)
            for number, name in enumerate(self._names)
        }
        self._loop.call(self.engines.prepare(orders))
        self._watch("pause")
        self.paused_at = time.time()
        self._loop.call(self.engines.pause(self._ways.pause_mode))
        self._watch("transfer")
        manifests = self._transfer(orders)
        self._watch("finish")
        self._loop.call(self.engines.finish(manifests))
        self._watch("commit")
        lost = self._loop.call(self.engines.commit(self._version, manifests))
        lost |= self._wake(holds, "cache", besides=lost)
        if len(lost) == len(self._all):
            raise EnginesFailed(lost)
        elements = sum(answer.elements for answer in answers)
        return Sent(
            update=self.update,
            manifests={name: manifest for name, manifest in manifests.items() if name not in lost},
            lost=lost,
            transport=self.transport,
            delta=self.delta,
            bytes=total_bytes(letters),
            messages=sum(map(len, letters.values())),
            whole_bytes=sum(answer.whole_bytes for answer in answers),
            changed=sum(answer.changed for answer in answers) / elements if self.delta and elements else 1.0,
            paused_at=self.paused_at,
            index=self._index(orders, manifests) if self.transport == "disk" else None,
        )

    def keep_folder(self, sent: Sent) -> None:
        """After the commit: complete the folder of a full update, for whoever comes later, and delete older ones.

        Raises FolderError.
        """
        root = Path(self._ways.folder)
        folder = root / folder_name(self._version, self.update)
        if sent.index is None:
            return
        if sent.delta:
            # Every engine has it, and nobody else can begin with it.
            shutil.rmtree(folder, ignore_errors=True)
            return
        FolderWriter(folder).complete(sent.index)
        prune(root, folder)

    def _index(self, orders: Mapping[str, Prepare], manifests: Mapping[str, str]) -> Index:
        name, order = next(iter(orders.items()))
        return Index(
            epoch=self._epoch,
            version=self._version,
            base=order.base,
            manifest=manifests[name],
            streams=order.streams,
            schedules=order.schedules,
        )

    def _wake(self, holds: Mapping[str, Hold], memory: Memory, besides: Collection[str] = ()) -> dict[str, str]:
        """Let colocated engines take a part of their memory back. The reasons of those that cannot."""
        asleep = [e for e in self._all if memory in holds[e.name].released and e.name not in besides]
        if not asleep:
            return {}
        self._watch(f"wake {memory}")
        return self._loop.call(self.engines.wake(asleep, memory, self._epoch))

    def _announce(self) -> Sequence[Answer]:
        """All ranks agree on the messages: changes if they are worth it, else all weights."""
        if self.delta:
            answers = self._command(Announce(version=self._version, changes=True))
            nbytes = sum(letter.nbytes for answer in answers for letter in answer.letters)
            whole = sum(answer.whole_bytes for answer in answers)
            if not any(answer.too_much for answer in answers) and nbytes <= self._ways.max_fraction * whole + ROOM:
                return answers
            self.delta = False
        return self._command(Announce(version=self._version, changes=False))

    def _open_place(self) -> str:
        if self.transport == "disk":
            return f"{self._ways.folder}/{folder_name(self._version, self.update)}"
        if self.transport == "shared_memory":
            return f"{self._ways.folder}/moe-asyncrl-{self.update}"
        return ""

    def _order(self, number: int, channels: Mapping[int, str], place: str, base: Base | None) -> Prepare:
        plan, work = self._side.plan, self._side.work
        assert plan is not None and work is not None

        def channel(stream: int, sender: int) -> str:
            if self.transport == "shared_memory":
                return ring_path(place, stream)
            return place or channels[sender]

        # A sender without messages in this update has no ring either.
        used = {letter.stream for own in self._side.letters.values() for letter in own}
        streams = [s for s in streams_to(plan, work.streams, number) if s.number in used]
        return Prepare(
            update=self.update,
            epoch=self._epoch,
            version=self._version,
            base=base,
            transport=self.transport,
            streams=tuple(
                Stream(number=s.number, sender=s.sender, channel=channel(s.number, s.sender)) for s in streams
            ),
            schedules=schedule(plan, work.streams, sizes(self._side.letters), number),
            first_reader=int(plan.engine_starts[number]),
            depth=self._ways.depth,
            wait_s=self._ways.timeout_s,
        )

    def _transfer(self, orders: Mapping[str, Prepare]) -> dict[str, str]:
        """Senders send and engines receive, side by side. Returns each engine's manifest, as sent."""
        call_off = self._stop.put_up if self._stop is not None else (lambda update: None)
        receiving: Future[None] = self._loop.submit(
            self.engines.receive(lambda: call_off(self.update), self._channels.left_by)
        )
        try:
            answers = self._command(Send(update=self.update, epoch=self._epoch, version=self._version))
        except BaseException:
            receiving.cancel()
            raise
        failed = next((answer.failed for answer in answers if answer.failed), "")
        if failed:
            # What senders saw is mostly the consequence of what an engine did: it says so at once, or is gone.
            with contextlib.suppress(TimeoutError):
                receiving.result(BLAME_S)
            # What engines complain of from here on is that the senders have left.
            self._channels.abandon()
            receiving.cancel()
            raise EnginesFailed({}, failed)
        receiving.result()
        digests = {stream: value for answer in answers for stream, value in answer.digests.items()}
        return {
            name: manifest_digest({s.number: digests[s.number] for s in order.streams})
            for name, order in orders.items()
        }
