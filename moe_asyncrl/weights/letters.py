"""What all ranks agree on before a transfer: the messages of every sender, with their sizes. Pure.

Each rank announces what it will send, or (changes) what it has for a sender to send on. From the announcements of all
ranks every rank works out the same list: the k-th letter of a sender belongs to round k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """One message, before it is written."""

    sender: int
    stream: int
    source: int
    """Rank that has encoded it; -1: the sender puts it together from contributions."""
    nbytes: int
    """Of the whole message."""
    header_bytes: int
    number: int = -1
    """In its stream."""


def in_order(announced: Sequence[Sequence[Letter]]) -> dict[int, tuple[Letter, ...]]:
    """By sender, numbered. `announced`: by rank; each rank's letters keep their order."""
    found: dict[int, list[Letter]] = {}
    numbers: dict[int, int] = {}
    for letters in announced:
        for letter in letters:
            number = numbers.get(letter.stream, 0)
            numbers[letter.stream] = number + 1
            found.setdefault(letter.sender, []).append(msgspec.structs.replace(letter, number=number))
    return {sender: tuple(letters) for sender, letters in sorted(found.items())}


def sizes(letters: Mapping[int, Sequence[Letter]]) -> dict[int, list[tuple[int, int]]]:
    """(stream, bytes) of each sender's messages, as `work.schedule` takes them."""
    return {sender: [(letter.stream, letter.nbytes) for letter in own] for sender, own in letters.items()}


def rounds(letters: Mapping[int, Sequence[Letter]]) -> int:
    """How many rounds the transfer has."""
    return max((len(own) for own in letters.values()), default=0)


def total_bytes(letters: Mapping[int, Sequence[Letter]]) -> int:
    """Bytes of all messages, once."""
    return sum(letter.nbytes for own in letters.values() for letter in own)
