"""Before the pause: each source encodes what changed in its pieces, as whole messages that only lack their seals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import msgspec
import torch

from moe_asyncrl.weights.letters import Letter
from moe_asyncrl.weights.message import PREFIX_BYTES, message_bytes, payload_view, sparse_header
from moe_asyncrl.weights.message_part import Part, place_parts
from moe_asyncrl.weights.pack import Parameters, piece_at_source
from moe_asyncrl.weights.snapshot import Snapshot
from moe_asyncrl.weights.sparse import Ints
from moe_asyncrl.weights.sparse_encode import Encoded as EncodedPiece
from moe_asyncrl.weights.sparse_encode import Encoding
from moe_asyncrl.weights.work import Work

T = TypeVar("T")
AT_ONCE = 32
"""Pieces that a thread looks at before it tells: waking another thread takes as long as a look at a small piece."""
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
    next update has to be a full one. `threads`: beside this one; the bytes are the same whatever their number.
    """
    if snapshot.begin(version) is None:
        return None
    pieces = _pieces(work)
    left = max_fraction * sum(part.elements * part.itemsize for part in pieces.values()) + ROOM
    found: dict[int, EncodedPiece] = {}

    def look(number: int) -> tuple[int, Encoding, list[Ints]]:
        value = piece_at_source(work.origins[number], parameters)
        encoding = snapshot.compare(number, value.to(getattr(torch, pieces[number].dtype)).contiguous())
        return number, encoding, encoding.look()

    for number, encoding, where in _ahead(look, pieces, threads):
        # Small pieces may change altogether: what counts is the sum.
        encoded = encoding.take(where, int(left))
        if encoded.blob is None:
            return None
        left -= encoded.blob.nbytes if encoded.changed else 0
        found[number] = encoded
    letters: list[Letter] = []
    blobs: list[torch.Tensor] = []
    for sender, stream, parts in _messages(work, found, bucket_bytes):
        letter, blob = _message(work.rank, sender, stream, parts, found)
        letters.append(letter)
        blobs.append(blob)
    changed = sum(encoded.changed for encoded in found.values())
    return Encoded(tuple(letters), tuple(blobs), changed, sum(encoded.elements for encoded in found.values()))


def _ahead(call: Callable[[int], T], numbers: Iterable[int], threads: int) -> Iterator[T]:
    """What `call` gives for each number, in their order; each of the other threads is ahead by `AT_ONCE` of them."""
    waiting: deque[Future[list[T]]] = deque()
    rest = iter(numbers)
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(rest, AT_ONCE)):
            waiting.append(pool.submit(lambda batch: [call(number) for number in batch], batch))
            if len(waiting) > threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _pieces(work: Work) -> dict[int, Part]:
    return {piece.number: piece.part for given in work.own for piece in given.pieces}


def _messages(
    work: Work, found: Mapping[int, EncodedPiece], bucket_bytes: int
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
    rank: int, sender: int, stream: int, pieces: list[tuple[int, Part]], found: Mapping[int, EncodedPiece]
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
