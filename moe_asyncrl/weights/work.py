"""What one trainer rank does in an update: which messages it sends, what it puts into them, what it gives to others.

    message       a bucket on its way in a stream; the sender's k-th message belongs to round k
    contribution  what one rank puts into a message: its pieces of the bucket, packed, or straight in their places
    piece         some elements of a tensor, where they lie in the rank's parameters and where in the message

Streams. `broadcast`: one for each root, to all engine ranks. `direct`: one for each source and set of receivers. They
are numbered in the order of their senders (and receivers), the same on every rank. Engine ranks take the messages of
all their streams in the order of (round, sender): every sender sends in the order of its rounds, so the first message
that is still missing is always on its way, and nobody waits in a circle. Pure arithmetic on a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_asyncrl.models.algebra import Block
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.weights.message_part import Part, place_parts
from moe_asyncrl.weights.plan import Plan


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages from one trainer rank to one set of engine ranks."""

    number: int
    sender: int
    receivers: int
    """Number in the plan's `receivers`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements that one rank puts into a message."""

    number: int
    """In the plan."""
    part: Part
    """Its elements; `offset`: where they lie when the contribution is packed."""
    home: int
    """The part of the message that it is of."""
    inside: tuple[slice, ...]
    """Where it lies in that part."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank gives to one message."""

    source: int
    sender: int
    stream: int
    round: int
    parts: tuple[Part, ...]
    """Of the message."""
    payload_bytes: int
    """Of the message."""
    pieces: tuple[Piece, ...]
    packed_bytes: int
    """Of the pieces, one behind the other."""
    fills: bool
    """The pieces are all of the message, so they need not be packed: they travel lying in their places."""

    @property
    def nbytes(self) -> int:
        """What travels from the source to the sender."""
        return self.payload_bytes if self.fills else self.packed_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message of this rank."""

    stream: int
    number: int
    """In the stream."""
    round: int
    parts: tuple[Part, ...]
    payload_bytes: int
    contributions: tuple[Contribution, ...]
    """By source; together they fill every part."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a piece lies on its source."""

    entry: str
    """Canonical name of the Megatron parameter."""
    block: Block
    inner: tuple[slice, ...]
    """Inside of the block in the HF tensor's orientation."""


@dataclass(frozen=True)
class Work:
    """The part of one rank."""

    rank: int
    streams: tuple[Stream, ...]
    """All streams of the plan, in the order of their numbers."""
    sends: tuple[Message, ...]
    """By round."""
    gives: tuple[Contribution, ...]
    """To messages of other ranks, by round."""
    origins: Mapping[int, Origin]
    """By number of the piece: all that this rank puts into any message."""

    @cached_property
    def gives_by_round(self) -> Mapping[int, tuple[Contribution, ...]]:
        """What other ranks get in each round."""
        found: dict[int, list[Contribution]] = {}
        for give in self.gives:
            found.setdefault(give.round, []).append(give)
        return {number: tuple(gives) for number, gives in found.items()}

    @property
    def own(self) -> Iterator[Contribution]:
        """Everything that this rank puts into messages, its own ones and those of others."""
        for message in self.sends:
            yield from (c for c in message.contributions if c.source == self.rank)
        yield from self.gives


def streams_of(plan: Plan) -> tuple[Stream, ...]:
    """All streams of a plan."""
    d, s = plan.deliveries, plan.sends
    if plan.mode == "broadcast":
        pairs = {(int(root), int(to)) for root, to in zip(d.root, d.receivers, strict=True)}
    else:
        pairs = {(int(source), int(to)) for source, to in zip(s.source, d.receivers[s.delivery], strict=True)}
    return tuple(Stream(number, *pair) for number, pair in enumerate(sorted(pairs)))


def rank_work(plan: Plan, rank: int) -> Work:
    """The work of one rank in a plan that has passed its check."""
    streams = streams_of(plan)
    by_pair = {(s.sender, s.receivers): s.number for s in streams}
    reader = _Reader(plan)
    sends: list[Message] = []
    gives: list[Contribution] = []
    rounds: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for delivery, bucket in enumerate(plan.deliveries.bucket):
        receivers = int(plan.deliveries.receivers[delivery])
        sources = reader.sources(delivery)
        root = int(plan.deliveries.root[delivery])
        for sender in (root,) if root >= 0 else sorted(sources):
            stream = by_pair[sender, receivers]
            turn, number = rounds.get(sender, 0), numbers.get(stream, 0)
            rounds[sender], numbers[stream] = turn + 1, number + 1
            if rank != sender and (root < 0 or rank not in sources):
                continue
            if root < 0:
                made = [_direct(reader, int(bucket), sources[sender], sender, stream, turn)]
            else:
                wanted = sorted(sources) if rank == root else [rank]
                made = _broadcast(reader, int(bucket), sources, wanted, root, stream, turn)
            if rank == sender:
                sends.append(Message(stream, number, turn, made[0].parts, made[0].payload_bytes, tuple(made)))
            else:
                gives += made
    own = {p.number for message in sends for c in message.contributions if c.source == rank for p in c.pieces}
    own |= {p.number for c in gives for p in c.pieces}
    return Work(rank, streams, tuple(sends), tuple(gives), _origins(plan, rank, sorted(own)))


def schedule(
    plan: Plan, streams: Sequence[Stream], sizes: Mapping[int, Sequence[tuple[int, int]]], engine: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(stream, bytes) of what each rank of an engine receives, in order: one schedule for all ranks if they are alike.

    `sizes`: for each sender its messages as (stream, bytes), by round.
    """
    order = [
        (turn, sender, stream, nbytes)
        for sender, messages in sizes.items()
        for turn, (stream, nbytes) in enumerate(messages)
    ]
    order.sort()
    per_rank = []
    for rank in range(plan.engines[engine].tp):
        number = int(plan.engine_starts[engine]) + rank
        mine = {s.number for s in streams if number in plan.receiver_numbers[s.receivers]}
        per_rank.append(tuple((stream, nbytes) for _, _, stream, nbytes in order if stream in mine))
    return tuple(per_rank) if len(set(per_rank)) > 1 else tuple(per_rank[:1])


def streams_to(plan: Plan, streams: Sequence[Stream], engine: int) -> tuple[Stream, ...]:
    """The streams that any rank of an engine receives."""
    first, behind = (int(n) for n in plan.engine_starts[engine : engine + 2])
    return tuple(
        s for s in streams if any(first <= int(number) < behind for number in plan.receiver_numbers[s.receivers])
    )


class _Reader:
    """Looks pieces up in the columns of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._bounds = np.searchsorted(plan.parts.bucket[plan.pieces.part], np.arange(len(plan.bucket_nbytes) + 1))
        self._part_bounds = np.searchsorted(plan.parts.bucket, np.arange(len(plan.bucket_nbytes) + 1))
        self._holder = plan.blocks.holder[plan.pieces.block]
        self._send_bounds = np.searchsorted(plan.sends.delivery, np.arange(len(plan.deliveries.bucket) + 1))
        if (np.diff(plan.sends.delivery) < 0).any():
            raise ValueError("the sends of a plan are not in the order of its deliveries")

    def sources(self, delivery: int) -> dict[int, list[int]]:
        """Source -> the sets of ranks in whose name it sends."""
        found: dict[int, list[int]] = {}
        for n in range(self._send_bounds[delivery], self._send_bounds[delivery + 1]):
            found.setdefault(int(self.plan.sends.source[n]), []).append(int(self.plan.sends.holder[n]))
        return found

    def parts(self, bucket: int) -> tuple[Part, ...]:
        """The parts of a bucket as those of a message."""
        plan = self.plan
        found = []
        for n in range(self._part_bounds[bucket], self._part_bounds[bucket + 1]):
            tensor = plan.tensors[plan.parts.tensor[n]]
            ranges = [(int(plan.parts.low[n, a]), int(plan.parts.high[n, a]), 1) for a in range(len(tensor.shape))]
            dtype = tensor.dtype or plan.dtype
            found.append(Part(tensor.name, dtype, tensor.shape, tuple(ranges), int(plan.parts.offset[n])))
        return tuple(found)

    def pieces(self, bucket: int, holders: Sequence[int]) -> tuple[tuple[Piece, ...], int]:
        """The pieces of some sets of ranks in a bucket, packed, and the bytes that they take."""
        plan = self.plan
        first, count = plan.piece_slices
        span = slice(self._bounds[bucket], self._bounds[bucket + 1])
        numbers = np.flatnonzero(np.isin(self._holder[span], holders)) + span.start
        raw, homes, insides = [], [], []
        for n in numbers.tolist():
            part, block = int(plan.pieces.part[n]), int(plan.pieces.block[n])
            tensor = plan.tensors[plan.parts.tensor[part]]
            ranges, inside = [], []
            for axis in range(len(tensor.shape)):
                start, step = int(first[n, axis]), int(plan.blocks.step[block, axis])
                stop = start + (int(count[n, axis]) - 1) * step + 1
                low = int(plan.parts.low[part, axis])
                ranges.append((start, stop, step))
                inside.append(slice(start - low, stop - low, step))
            raw.append(Part(tensor.name, tensor.dtype or plan.dtype, tensor.shape, tuple(ranges), 0))
            homes.append(part - int(self._part_bounds[bucket]))
            insides.append(tuple(inside))
        placed, nbytes = place_parts(raw)
        found = zip(numbers.tolist(), placed, homes, insides, strict=True)
        return tuple(Piece(int(n), p, home, inside) for n, p, home, inside in found), nbytes


def _broadcast(
    reader: _Reader,
    bucket: int,
    sources: Mapping[int, list[int]],
    wanted: Sequence[int],
    root: int,
    stream: int,
    turn: int,
) -> list[Contribution]:
    parts = reader.parts(bucket)
    payload = int(reader.plan.bucket_nbytes[bucket])
    found = []
    for source in wanted:
        pieces, packed = reader.pieces(bucket, sources[source])
        found.append(Contribution(source, root, stream, turn, parts, payload, pieces, packed, len(sources) == 1))
    return found


def _direct(reader: _Reader, bucket: int, holders: Sequence[int], source: int, stream: int, turn: int) -> Contribution:
    """The pieces are the message's parts themselves."""
    pieces, packed = reader.pieces(bucket, holders)
    parts = tuple(piece.part for piece in pieces)
    placed = tuple(
        Piece(p.number, p.part, home, tuple(slice(0, n) for n in p.part.counts)) for home, p in enumerate(pieces)
    )
    return Contribution(source, source, stream, turn, parts, packed, placed, packed, True)


def _origins(plan: Plan, rank: int, numbers: Sequence[int]) -> dict[int, Origin]:
    held = {
        (block.hf.name, block.hf_ranges): (shard.entry.name, block)
        for shard in rank_shards(plan.spec, plan.layout, rank)
        if not shard.entry.tied_copy
        for block in shard.blocks
    }
    first, count = plan.piece_slices
    found = {}
    for n in numbers:
        number = int(plan.pieces.block[n])
        tensor = plan.tensors[plan.blocks.tensor[number]]
        low, high, step = (getattr(plan.blocks, c)[number].tolist() for c in ("low", "high", "step"))
        ranges = tuple(range(low[a], high[a], step[a]) for a in range(len(tensor.shape)))
        entry, block = held[tensor.name, ranges]
        inner = []
        for axis in range(len(tensor.shape)):
            start = (int(first[n, axis]) - low[axis]) // step[axis]
            inner.append(slice(start, start + int(count[n, axis])))
        found[n] = Origin(entry, block, tuple(inner))
    return found
