"""One transfer on one trainer rank: in round k every sender puts its k-th message together and sends it.

    each round:  pack what others need │ room for the own message, own pieces into it ─▶ all ranks agree to go on
                 ─▶ exchange pieces ─▶ seal ─▶ send (the message is on its way during the next rounds)

Whatever a rank may fail at comes before the agreement, so that no rank waits in an exchange that another one has left.
Memory: `depth` messages at the sender, what it is given for one, and what this rank gives in one round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import DeadlineExceeded
from moe_asyncrl.weights.agree import collective_device, lowest_failed
from moe_asyncrl.weights.fill import Arrival, Filler
from moe_asyncrl.weights.letters import Letter, rounds
from moe_asyncrl.weights.message import seal
from moe_asyncrl.weights.message_device import seal_on_device
from moe_asyncrl.weights.stream_digest import StreamDigest
from moe_asyncrl.weights.transport import Sender, SendFailed

WHAT = "sending weights"


class TransferStopped(Exception):
    """The transfer ended early on all ranks. `reason`: this rank's own; "" if it only follows another one."""

    def __init__(self, reason: str, *, fatal: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fatal = fatal
        """Not engines are at fault: another attempt would fail as well."""


class Transfer:
    """Made for one transfer; `run` it once. `digests` has this rank's streams afterwards."""

    def __init__(
        self,
        rank: int,
        letters: Mapping[int, Sequence[Letter]],
        filler: Filler,
        sender: Sender | None,
        *,
        epoch: int,
        version: int,
        timeout_s: float,
        stop: Callable[[], bool] = lambda: False,
        group: dist.ProcessGroup | None = None,
        watch: Callable[[int], None] = lambda turn: None,
    ) -> None:
        """`letters`: of all senders, the same on every rank. `sender`: None where this rank sends nothing to engines.

        `stop`: a cheap look at whether the transfer is called off. `watch` is told each round as it begins.
        """
        self._rank = rank
        self._own = tuple(letters.get(rank, ()))
        self._rounds = rounds(letters)
        self._filler = filler
        self._sender = sender
        self._epoch, self._version = epoch, version
        self._timeout_s = timeout_s
        self._stop = stop
        self._group = group
        self._watch = watch
        self._host: torch.Tensor | None = None
        self.digests: dict[int, StreamDigest] = {}

    def run(self) -> None:
        """Collective over the trainer's ranks.

        Raises:
            TransferStopped: this rank or another one cannot go on; all ranks have left the transfer.
            DeadlineExceeded: another rank did not come.
        """
        late: Exception | None = None
        for turn in range(self._rounds):
            self._watch(turn)
            letter = self._own[turn] if turn < len(self._own) else None
            given: list[tuple[torch.Tensor, int]] = []
            room: list[torch.Tensor] = []
            late = late or self._try(lambda: self._prepare(turn, letter, given, room))  # noqa: B023  used at once
            self._agree(late)
            if letter is None:
                self._exchange(given, [], turn)
                continue
            message = room[0]
            arrivals = self._filler.arrivals(turn, letter, message)
            self._exchange(given, arrivals, turn)
            late = self._try(lambda: self._finish(turn, letter, message, arrivals))  # noqa: B023  used at once
        if self._sender is not None:
            late = late or self._try(self._sender.drain)
        self._agree(late)

    def _prepare(
        self,
        turn: int,
        letter: Letter | None,
        given: list[tuple[torch.Tensor, int]],
        room: list[torch.Tensor],
    ) -> None:
        """Everything of a round that can fail on this rank alone."""
        given += self._filler.gives(turn, collective_device(self._group))
        if letter is not None:
            if self._sender is None:
                raise ValueError(f"rank {self._rank} has messages and no way to send them")
            room.append(self._sender.room(letter.stream, letter.nbytes))
            self._filler.begin(turn, letter, room[0])
        if self._stop():
            raise SendFailed("called off")

    def _finish(self, turn: int, letter: Letter, message: torch.Tensor, arrivals: Sequence[Arrival]) -> None:
        assert self._sender is not None
        for arrival in arrivals:
            self._filler.end(turn, arrival, message)
        header = self._filler.header(turn, letter, message)
        fields: dict[str, Any] = {
            "kind": self._filler.kind,
            "epoch": self._epoch,
            "version": self._version,
            "stream": letter.stream,
            "number": letter.number,
            "header": header,
        }
        if message.is_cuda:
            if self._host is None or len(self._host) < len(message):
                self._host = torch.empty(len(message), dtype=torch.uint8, pin_memory=True)
            digest = seal_on_device(message, self._host, **fields)
        else:
            digest = seal(message, **fields)
        self.digests.setdefault(letter.stream, StreamDigest()).add(digest)
        self._sender.send(letter.stream, letter.number, message)

    def _exchange(self, given: Sequence[tuple[torch.Tensor, int]], arrivals: Sequence[Arrival], turn: int) -> None:
        if not given and not arrivals:
            return
        device = collective_device(self._group)
        landed = [
            a.into if a.into.device.type == device.type else torch.empty_like(a.into, device=device) for a in arrivals
        ]
        ops = [dist.P2POp(dist.isend, data, group=self._group, group_peer=to) for data, to in given]
        ops += [
            dist.P2POp(dist.irecv, into, group=self._group, group_peer=a.source)
            for a, into in zip(arrivals, landed, strict=True)
        ]
        peers = sorted({to for _, to in given} | {a.source for a in arrivals})
        try:
            for work in dist.batch_isend_irecv(ops):
                work.wait(timedelta(seconds=self._timeout_s))
        except (RuntimeError, dist.DistError) as error:
            raise DeadlineExceeded(
                f"rank {self._rank}: the exchange of weights with rank {', '.join(map(str, peers))} in round {turn} "
                f"failed or took over {self._timeout_s:g} s: {error}"
            ) from error
        for arrival, into in zip(arrivals, landed, strict=True):
            if into is not arrival.into:
                arrival.into.copy_(into)

    def _agree(self, failure: Exception | None) -> None:
        first = lowest_failed(None if failure is None else self._rank, WHAT, self._group) if self._many else None
        if failure is not None:
            raise TransferStopped(str(failure), fatal=not isinstance(failure, SendFailed)) from None
        if first is not None:
            raise TransferStopped("", fatal=False)

    @property
    def _many(self) -> bool:
        return dist.is_initialized() and dist.get_world_size(self._group) > 1

    @staticmethod
    def _try(step: Callable[[], None]) -> Exception | None:
        try:
            step()
        except Exception as error:
            return error
        return None
