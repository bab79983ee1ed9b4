"""What every trainer rank does in an update, order by order; see `orders`. It keeps the plan, groups and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.changes import Encoded, encode_changes
from moe_asyncrl.weights.coded import Coded, CodedFiller, Coder, coded_message, letter_of
from moe_asyncrl.weights.fill import ChangeFiller, Filler, WeightFiller
from moe_asyncrl.weights.group import Rendezvous, connect, drop
from moe_asyncrl.weights.letters import Letter, in_order
from moe_asyncrl.weights.message import dense_header, message_bytes
from moe_asyncrl.weights.orders import Announce, Answer, AnyOrder, Connect, Drop, MakePlan, Open, Send, Settle
from moe_asyncrl.weights.pack import Parameters, parameter_problem
from moe_asyncrl.weights.plan import Plan
from moe_asyncrl.weights.plan_check import check
from moe_asyncrl.weights.plan_make import make_plan
from moe_asyncrl.weights.ring import RingWriter
from moe_asyncrl.weights.rounds import Transfer, TransferStopped
from moe_asyncrl.weights.snapshot import Snapshot
from moe_asyncrl.weights.stop_sign import StopSign
from moe_asyncrl.weights.transport import FolderSender, GroupSender, Link, RingSender, Sender, SendFailed, Waits
from moe_asyncrl.weights.work import Work, rank_work

Watch = Callable[[str, int], None]
"""Is told each phase as it begins on this rank, with the round of `send` (0 elsewhere)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What does not change from update to update."""

    dtype: torch.dtype
    bucket_bytes: int
    roots_per_stage: int
    timeout_s: float
    keep_copies: bool
    """Of what was sent, so that the next update may send changes alone."""
    max_fraction: float
    """Changes that take more than this of the bytes of a rank's pieces are not worth sending."""
    threads: int = 1
    """That look for changes, beside the one that writes them down."""
    coder: Coder | None = None
    """Of weights that engines hold in another form. Only whole weights to all are sent then: no changes, no slices."""


class RankSide:
    """One on each trainer rank, driven by the first one's orders."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        parameters: Callable[[], Parameters],
        settings: Settings,
        *,
        group: dist.ProcessGroup | None = None,
        watch: Watch = lambda phase, turn: None,
    ) -> None:
        """`parameters` gives this rank's weights by canonical global name; it is asked in each update."""
        if settings.coder is not None and settings.keep_copies:
            raise ValueError("changes of coded weights cannot be sent")
        self._spec, self._layout, self.rank = spec, layout, rank
        self._parameters = parameters
        self._settings = settings
        self.stop: StopSign | None = None
        """To be set before the first transfer of several ranks."""
        self._group = group
        self._watch = watch
        self.plan: Plan | None = None
        self.work: Work | None = None
        self._headers: list[bytes] = []
        self._coded: list[Coded] = []
        self._groups: dict[str, Any] = {}
        self._snapshot: Snapshot[int] | None = Snapshot() if settings.keep_copies else None
        self._encoded: Encoded | None = None
        self.letters: dict[int, tuple[Letter, ...]] = {}
        self._opened: Open | None = None
        self._rings: dict[int, RingWriter] = {}

    def do(self, order: AnyOrder) -> Answer:
        """Carry out an order. What goes wrong is in the answer; nothing is raised."""
        try:
            match order:
                case MakePlan():
                    self._make_plan(order)
                case Connect():
                    self._connect(order.sender, order.at)
                case Announce():
                    return self._announce(order)
                case Open():
                    self._open(order)
                case Send():
                    return self._send(order)
                case Settle():
                    self._settle(order)
                case Drop():
                    self._drop_groups()
        except SendFailed as error:
            return Answer(failed=f"rank {self.rank}: {first_line(error)}")
        except Exception as error:
            return Answer(problem=f"rank {self.rank}: {first_line(error)}")
        return Answer()

    def agreed(self, order: AnyOrder, answers: Sequence[Answer]) -> None:
        """What all ranks have answered."""
        if isinstance(order, Announce):
            self.letters = in_order([answer.letters for answer in answers])

    def close(self) -> None:
        """Leave groups, take rings away."""
        self._drop_groups()
        self._close_rings()

    # --- orders ---------------------------------------------------------------------------------------------------

    def _make_plan(self, order: MakePlan) -> None:
        self._watch("plan", 0)
        plan = self.plan
        if plan is not None and (plan.mode, plan.engines) == (order.mode, order.engines):
            return
        s = self._settings
        if s.coder is not None and order.mode == "direct":
            raise ValueError("weights that are coded go whole to all engines, not in slices")
        made = make_plan(
            self._spec,
            self._layout,
            order.engines,
            mode=order.mode,
            dtype=str(s.dtype).removeprefix("torch."),
            bucket_bytes=s.bucket_bytes,
            roots_per_stage=s.roots_per_stage,
            rows=1 if s.coder is None else s.coder.rows,
        )
        check(made)
        if self._snapshot is not None and (order.mode == "direct" or plan is None or plan.mode != order.mode):
            # In `broadcast` the pieces do not depend on the engines.
            self._snapshot.forget()
        self.plan, self.work = made, rank_work(made, self.rank)
        self._headers = [dense_header(message.parts) for message in self.work.sends]
        if s.coder is not None:
            self._coded = [coded_message(message, s.coder) for message in self.work.sends]

    def _connect(self, sender: int, at: Rendezvous) -> None:
        self._watch("connect", 0)
        if sender == self.rank:
            self._groups[at.name] = connect(at)

    def _announce(self, order: Announce) -> Answer:
        self._watch("announce", 0)
        work = self._the_work
        parameters = self._parameters()
        if problem := parameter_problem(parameters, self._spec, self._layout, self.rank):
            raise UserError(problem)
        if self._settings.coder is None:
            whole = tuple(
                Letter(self.rank, m.stream, -1, message_bytes(header, m.payload_bytes), len(header))
                for m, header in zip(work.sends, self._headers, strict=True)
            )
        else:
            whole = tuple(letter_of(self.rank, m, c) for m, c in zip(work.sends, self._coded, strict=True))
        self._encoded = None
        whole_bytes = sum(letter.nbytes for letter in whole)
        if not order.changes:
            return Answer(letters=whole, whole_bytes=whole_bytes)
        if self._snapshot is None:
            raise ValueError("no copies of the weights are kept")
        found = encode_changes(
            work,
            parameters,
            self._snapshot,
            version=order.version,
            bucket_bytes=self._settings.bucket_bytes,
            max_fraction=self._settings.max_fraction,
            threads=self._settings.threads,
        )
        if found is None:
            return Answer(whole_bytes=whole_bytes, too_much=True)
        self._encoded = found
        return Answer(letters=found.letters, whole_bytes=whole_bytes, changed=found.changed, elements=found.elements)

    def _open(self, order: Open) -> None:
        self._watch("open", 0)
        self._opened = order
        own = self.letters.get(self.rank, ())
        if order.transport == "disk" and own:
            Path(order.place).mkdir(parents=True, exist_ok=True)
        if order.transport == "shared_memory":
            self._close_rings()
            for stream in sorted({letter.stream for letter in own}):
                self._rings[stream] = RingWriter(
                    Path(ring_path(order.place, stream)),
                    slots=order.depth,
                    slot_bytes=max(letter.nbytes for letter in own if letter.stream == stream),
                    readers=order.readers,
                )

    def _send(self, order: Send) -> Answer:
        self._watch("send", 0)
        stop = self.stop.of(order.update) if self.stop is not None else (lambda: False)
        if self._encoded is None:
            if self._snapshot is not None:
                self._snapshot.begin(order.version)
            plain = WeightFiller(
                self._the_work,
                self._headers,
                self._parameters(),
                self._keep if self._snapshot is not None else None,
            )
            coder = self._settings.coder
            filler: Filler = plain if coder is None else CodedFiller(plain, self._coded, coder)
        else:
            filler = ChangeFiller(self.rank, self.letters, self._encoded.blobs)
        sender = self._sender(Waits(self._settings.timeout_s, stop))
        transfer = Transfer(
            self.rank,
            self.letters,
            filler,
            sender,
            epoch=order.epoch,
            version=order.version,
            timeout_s=self._settings.timeout_s,
            stop=stop if self.stop is not None and self.stop.first else (lambda: False),
            group=self._group,
            watch=lambda turn: self._watch("send", turn),
        )
        failed = True
        try:
            transfer.run()
            failed = False
        except TransferStopped as stopped:
            text = f"rank {self.rank}: {stopped.reason}" if stopped.reason else ""
            return Answer(problem=text) if stopped.fatal else Answer(failed=text or "called off")
        finally:
            self._encoded = None
            if sender is not None and (failed or self._opened is None or self._opened.transport != "shared_memory"):
                sender.close(failed=failed)
        return Answer(digests={stream: digest.value for stream, digest in transfer.digests.items()})

    def _settle(self, order: Settle) -> None:
        self._watch("settle", 0)
        self._close_rings()
        self._opened, self._encoded = None, None
        if self._snapshot is None:
            return
        if order.version is None:
            # Without a base the next update is a full one, which fills the copies anew.
            self._snapshot.begin(-1)
        else:
            self._snapshot.commit(order.version, "")

    # --- parts of them --------------------------------------------------------------------------------------------

    @property
    def _the_work(self) -> Work:
        if self.work is None:
            raise ValueError("there is no plan yet")
        return self.work

    def _keep(self, piece: int, value: torch.Tensor) -> None:
        assert self._snapshot is not None
        self._snapshot.store(piece, value)

    def _sender(self, waits: Waits) -> Sender | None:
        own, order = self.letters.get(self.rank, ()), self._opened
        if not own or order is None:
            return None
        largest = max(letter.nbytes for letter in own)
        if order.transport == "shared_memory":
            return RingSender(self._rings, waits)
        if order.transport == "disk":
            return FolderSender(Path(order.place), own, depth=order.depth, largest=largest, waits=waits)
        return GroupSender(self._links(), depth=order.depth, largest=largest, device=self._device(), waits=waits)

    def _links(self) -> dict[int, Link]:
        """Of this rank's streams: it has one group, with the engines that it sends to, in their order."""
        plan = self.plan
        assert plan is not None
        (name,) = self._groups
        found = {}
        for stream in self._the_work.streams:
            if stream.sender != self.rank:
                continue
            to = None
            if plan.mode == "direct":
                ranks = {number: at + 1 for at, number in enumerate(group_members(plan, self.rank)[1])}
                to = tuple(ranks[int(number)] for number in plan.receiver_numbers[stream.receivers])
            found[stream.number] = Link(self._groups[name], name, to)
        return found

    def _device(self) -> torch.device:
        (process_group,) = self._groups.values()
        if "nccl" in process_group.name().lower():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _drop_groups(self) -> None:
        groups, self._groups = self._groups, {}
        for process_group in groups.values():
            drop(process_group)

    def _close_rings(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings = {}


def ring_path(place: str, stream: int) -> str:
    """Where the ring of a stream lies."""
    return f"{place}-{stream}"


def group_members(plan: Plan, sender: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(engines, their ranks counted through all engines) in the group of a sender: all ranks of whom it sends to."""
    d, s = plan.deliveries, plan.sends
    sets = d.receivers[d.root == sender] if plan.mode == "broadcast" else d.receivers[s.delivery[s.source == sender]]
    engines = sorted({engine for number in set(sets.tolist()) for engine, _ in plan.members(int(number))})
    starts = plan.engine_starts
    return tuple(engines), tuple(n for e in engines for n in range(int(starts[e]), int(starts[e + 1])))
