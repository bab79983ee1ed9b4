"""Who puts which bytes into the messages of a transfer: pieces of weights, or changes that were encoded before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_asyncrl.weights.letters import Letter
from moe_asyncrl.weights.message import PREFIX_BYTES, Kind, host_bytes, payload_start
from moe_asyncrl.weights.pack import Kept, Parameters, place, write
from moe_asyncrl.weights.work import Contribution, Work


@dataclass(frozen=True)
class Arrival:
    """Bytes that another rank gives to a message of this one."""

    source: int
    into: torch.Tensor
    """uint8, contiguous: in the message itself, or beside it."""
    contribution: Contribution | None = None
    """Is to be placed in the message when it has come; None: it lies there already."""


class Filler(Protocol):
    """What the rounds of a transfer need of its contents."""

    @property
    def kind(self) -> Kind: ...

    def gives(self, turn: int, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        """(bytes on `device`, receiver) of what this rank gives to other ranks' messages in a round."""
        ...

    def begin(self, turn: int, letter: Letter, message: torch.Tensor) -> None:
        """Put this rank's own bytes into its own message."""
        ...

    def arrivals(self, turn: int, letter: Letter, message: torch.Tensor) -> list[Arrival]:
        """What others give to it."""
        ...

    def end(self, turn: int, arrival: Arrival, message: torch.Tensor) -> None:
        """Bytes of another rank are there."""
        ...

    def header(self, turn: int, letter: Letter, message: torch.Tensor) -> bytes:
        """Of the message, once it is filled."""
        ...


@dataclass(frozen=True)
class WeightFiller:
    """All weights, from the parameters."""

    work: Work
    headers: Sequence[bytes]
    """Of this rank's messages, by round."""
    parameters: Parameters
    kept: Kept | None = None
    kind: Kind = "dense"

    def gives(self, turn: int, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        found = []
        for given in self.work.gives_by_round.get(turn, ()):
            into = torch.empty(given.nbytes, dtype=torch.uint8, device=device)
            write(given, self.work.origins, self.parameters, into, in_place=given.fills, kept=self.kept)
            found.append((into, given.sender))
        return found

    def begin(self, turn: int, letter: Letter, message: torch.Tensor) -> None:
        for given in self.work.sends[turn].contributions:
            if given.source == self.work.rank:
                payload = self._payload(turn, message)
                write(given, self.work.origins, self.parameters, payload, in_place=True, kept=self.kept)

    def arrivals(self, turn: int, letter: Letter, message: torch.Tensor) -> list[Arrival]:
        found = []
        for given in self.work.sends[turn].contributions:
            if given.source == self.work.rank:
                continue
            if given.fills:
                found.append(Arrival(given.source, self._payload(turn, message)))
            else:
                into = torch.empty(given.nbytes, dtype=torch.uint8, device=message.device)
                found.append(Arrival(given.source, into, given))
        return found

    def end(self, turn: int, arrival: Arrival, message: torch.Tensor) -> None:
        if arrival.contribution is not None:
            place(arrival.contribution, arrival.into, self._payload(turn, message))

    def header(self, turn: int, letter: Letter, message: torch.Tensor) -> bytes:
        return self.headers[turn]

    def _payload(self, turn: int, message: torch.Tensor) -> torch.Tensor:
        return message[payload_start(self.headers[turn]) :]


class ChangeFiller:
    """Changes that each source has encoded as whole messages, but for their seals."""

    kind: Kind = "sparse"

    def __init__(self, rank: int, letters: Mapping[int, Sequence[Letter]], blobs: Sequence[torch.Tensor]) -> None:
        """`letters`: of all senders. `blobs`: this rank's, by sender and then in the order that they were announced."""
        self._rank = rank
        mine = [
            (sender, turn, letter)
            for sender, own in letters.items()
            for turn, letter in enumerate(own)
            if letter.source == rank
        ]
        if [len(blob) for blob in blobs] != [letter.nbytes for _, _, letter in mine]:
            raise ValueError("the changes are not those that were announced")
        self._blobs = {(sender, turn): blob for (sender, turn, _), blob in zip(mine, blobs, strict=True)}

    def gives(self, turn: int, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        mine = [(s, blob) for (s, t), blob in self._blobs.items() if t == turn and s != self._rank]
        return [(blob.to(device), sender) for sender, blob in mine]

    def begin(self, turn: int, letter: Letter, message: torch.Tensor) -> None:
        if letter.source == self._rank:
            message.copy_(self._blobs[self._rank, turn])

    def arrivals(self, turn: int, letter: Letter, message: torch.Tensor) -> list[Arrival]:
        return [] if letter.source == self._rank else [Arrival(letter.source, message)]

    def end(self, turn: int, arrival: Arrival, message: torch.Tensor) -> None:
        """The message is what has come."""

    def header(self, turn: int, letter: Letter, message: torch.Tensor) -> bytes:
        return bytes(host_bytes(message[PREFIX_BYTES : PREFIX_BYTES + letter.header_bytes].cpu()))
