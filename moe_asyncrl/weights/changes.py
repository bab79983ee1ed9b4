"""Before the pause: each source encodes what changed in its pieces, as whole messages that only lack their seals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import msgspec
import torch

from moe_asyncrl.weights import sparse
from moe_asyncrl.weights.letters import Letter
from moe_asyncrl.weights.message import PREFIX_BYTES, message_bytes, payload_view, sparse_header
from moe_asyncrl.weights.message_part import Part, place_parts
from moe_asyncrl.weights.pack import Parameters, piece_at_source
from moe_asyncrl.weights.snapshot import Snapshot
from moe_asyncrl.weights.work import Work

ROOM = 1 << 16
"""Bytes that changes may take whatever the model's size: heads of blobs alone are more than a tiny model's fraction."""


@dataclass(frozen=True)
class Encoded:
    """The changes of one rank."""

    letters: tuple[Letter, ...]
    blobs: tuple[torch.Tensor, ...]
    """One for each letter: uint8 [its bytes], with the header behind the place of the prefix."""
    changed: int
    """Elements with other bits."""
    elements: int


def encode_changes(
    work: Work,
    parameters: Parameters,
    snapshot: Snapshot[int],
    *,
    version: int,
    bucket_bytes: int,
    max_fraction: float,
    threads: int = 1,
) -> Encoded | None:
    """What changed in all pieces of a rank since the snapshot's base; the snapshot moves on to `version`.

    None: the changes would take more than `max_fraction` of the pieces' bytes, or the snapshot has no base. Then the
    next update has to be a full one. `threads` compare at once; the same bytes whatever their number.
    """
    if snapshot.begin(version) is None:
        return None
    pieces = _pieces(work)
    budget = _Budget(int(max_fraction * sum(part.elements * part.itemsize for part in pieces.values())) + ROOM)

    def compare(item: tuple[int, Part]) -> sparse.Encoded | None:
        number, part = item
        if budget.left < 0:
            return None
        value = piece_at_source(work.origins[number], parameters).to(getattr(torch, part.dtype)).contiguous()
        # Small pieces may change altogether: what counts is the sum.
        encoded = snapshot.changed(number, value, max_fraction=budget.left / max(1, value.nbytes))
        budget.take(encoded)
        return encoded

    with ThreadPoolExecutor(threads) as pool:
        compared = dict(zip(pieces, pool.map(compare, pieces.items()), strict=True))
    if budget.left < 0:
        return None
    found = {number: encoded for number, encoded in compared.items() if encoded is not None}
    letters: list[Letter] = []
    blobs: list[torch.Tensor] = []
    for sender, stream, parts in _messages(work, found, bucket_bytes):
        letter, blob = _message(work.rank, sender, stream, parts, found)
        letters.append(letter)
        blobs.append(blob)
    changed = sum(encoded.changed for encoded in found.values())
    return Encoded(tuple(letters), tuple(blobs), changed, sum(encoded.elements for encoded in found.values()))


class _Budget:
    """Bytes that changes may still take; below zero: too many. Shared by threads."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._lock = Lock()

    def take(self, encoded: sparse.Encoded) -> None:
        """Count what a piece's changes take."""
        with self._lock:
            if encoded.blob is None:
                self.left = -1
            elif encoded.changed:
                self.left -= encoded.blob.nbytes


def _pieces(work: Work) -> dict[int, Part]:
    return {piece.number: piece.part for given in work.own for piece in given.pieces}


def _messages(
    work: Work, found: Mapping[int, sparse.Encoded], bucket_bytes: int
) -> Iterator[tuple[int, int, list[tuple[int, Part]]]]:
    """(sender, stream, pieces) of each message: pieces of one stream in their order until a bucket is full.

    By sender, and in the order of rounds: so all ranks' letters fall into the order of `letters.in_order`.
    """
    streams: dict[tuple[int, int], list[tuple[int, Part]]] = {}
    for given in sorted(work.own, key=lambda g: (g.sender, g.stream, g.round)):
        own = streams.setdefault((given.sender, given.stream), [])
        own += [(piece.number, piece.part) for piece in given.pieces]
    for (sender, stream), pieces in streams.items():
        taken: list[tuple[int, Part]] = []
        filled = messages = 0
        for number, part in pieces:
            encoded = found[number]
            if not encoded.changed:
                continue
            assert encoded.blob is not None
            if taken and filled + encoded.blob.nbytes > bucket_bytes:
                yield sender, stream, taken
                taken, filled, messages = [], 0, messages + 1
            taken.append((number, part))
            filled += encoded.blob.nbytes
        if taken or not messages:
            # Nothing changed: one message says so, so that every receiver hears of the update.
            yield sender, stream, taken or pieces[:1]


def _message(
    rank: int, sender: int, stream: int, pieces: list[tuple[int, Part]], found: Mapping[int, sparse.Encoded]
) -> tuple[Letter, torch.Tensor]:
    blobs = [found[number].blob for number, _ in pieces]
    parts, payload_bytes = place_parts(
        msgspec.structs.replace(part, encoded_bytes=blob.nbytes)
        for (_, part), blob in zip(pieces, blobs, strict=True)
        if blob is not None
    )
    header = sparse_header(parts)
    message = torch.zeros(message_bytes(header, payload_bytes), dtype=torch.uint8)
    message[PREFIX_BYTES : PREFIX_BYTES + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    payload = payload_view(message, header).numpy()
    for part, blob in zip(parts, blobs, strict=True):
        payload[part.offset : part.offset + part.encoded_bytes] = blob
    return Letter(sender, stream, rank, len(message), len(header)), message
