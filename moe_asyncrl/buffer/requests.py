"""Builds the requests of one sender, numbered. Shared by both clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from moe_asyncrl.data import messages as m
from moe_asyncrl.data.wire import TrajectoryHeader


class Requests:
    """Requests of one sender. The number of each is new; a request that is sent again keeps its number."""

    def __init__(self, sender: str, epoch: int = 0) -> None:
        """`epoch`: the lease of the trainer that this sender belongs to; 0 for all others."""
        self.sender = sender
        self.epoch = epoch
        self._numbers = itertools.count(1)

    def _next(self) -> int:
        return next(self._numbers)

    def state(self) -> m.GetState:
        """See `GetState`."""
        return m.GetState(epoch=self.epoch, sender=self.sender, request=self._next())

    def set_phase(self, phase: m.Phase, error: str | None, epoch: int) -> m.SetPhase:
        """See `SetPhase`."""
        return m.SetPhase(epoch=epoch, sender=self.sender, request=self._next(), phase=phase, error=error)

    # --- trainer

    def acquire(self, holder: str) -> m.AcquireLease:
        """See `AcquireLease`."""
        return m.AcquireLease(epoch=0, sender=self.sender, request=self._next(), holder=holder)

    def begin(self, step: int, cursor: m.Cursor, counters: m.Counters) -> m.Begin:
        """See `Begin`."""
        return m.Begin(
            epoch=self.epoch, sender=self.sender, request=self._next(), step=step, cursor=cursor, counters=counters
        )

    def commit(self, version: int, members: Iterable[m.MemberId], lost: Iterable[m.MemberId]) -> m.Commit:
        """See `Commit`."""
        return m.Commit(
            epoch=self.epoch,
            sender=self.sender,
            request=self._next(),
            version=version,
            members=tuple(members),
            lost=tuple(lost),
        )

    def take(self, step: int, version: int, groups: int) -> m.Take:
        """See `Take`."""
        return m.Take(
            epoch=self.epoch, sender=self.sender, request=self._next(), step=step, version=version, groups=groups
        )

    def fetch(self, step: int, trajectories: Sequence[str], fields: Sequence[str]) -> m.Fetch:
        """See `Fetch`."""
        return m.Fetch(
            epoch=self.epoch,
            sender=self.sender,
            request=self._next(),
            step=step,
            trajectories=tuple(trajectories),
            fields=tuple(fields),
        )

    def fetch_rows(
        self, step: int, blocks: Sequence[int], cuts: Sequence[m.RowCut], digests: Sequence[str]
    ) -> m.FetchRows:
        """See `FetchRows`."""
        return m.FetchRows(
            epoch=self.epoch,
            sender=self.sender,
            request=self._next(),
            step=step,
            blocks=tuple(blocks),
            cuts=tuple(cuts),
            digests=tuple(digests),
        )

    def consumed(self, step: int) -> m.Consumed:
        """See `Consumed`."""
        return m.Consumed(epoch=self.epoch, sender=self.sender, request=self._next(), step=step)

    # --- engine

    def join(self, member: m.Member) -> m.Join:
        """See `Join`."""
        return m.Join(epoch=0, sender=self.sender, request=self._next(), member=member)

    def leave(self, life: m.MemberId, reason: str) -> m.Leave:
        """See `Leave`."""
        return m.Leave(
            epoch=0,
            sender=self.sender,
            request=self._next(),
            name=life.name,
            incarnation=life.incarnation,
            reason=reason,
        )

    # --- rollout

    def ask_tickets(self, wanted: int, holding: Iterable[m.Ticket]) -> m.AskTickets:
        """See `AskTickets`."""
        return m.AskTickets(epoch=0, sender=self.sender, request=self._next(), wanted=wanted, holding=tuple(holding))

    def put_group(self, ticket: m.Ticket, headers: Sequence[TrajectoryHeader], failed: int = 0) -> m.PutGroup:
        """See `PutGroup`. Sent under the lease that the credit was issued under."""
        return m.PutGroup(
            epoch=ticket.epoch,
            sender=self.sender,
            request=self._next(),
            ticket=ticket,
            headers=tuple(headers),
            failed=failed,
        )

    def return_ticket(
        self, ticket: m.Ticket, fate: Literal["failed", "filtered", "unused"], reason: str, trajectories: int
    ) -> m.ReturnTicket:
        """See `ReturnTicket`. Sent under the lease that the credit was issued under."""
        return m.ReturnTicket(
            epoch=ticket.epoch,
            sender=self.sender,
            request=self._next(),
            ticket=ticket,
            fate=fate,
            reason=reason,
            trajectories=trajectories,
        )
