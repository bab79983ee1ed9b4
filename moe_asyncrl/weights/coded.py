"""Messages of weights in a coded form (FP8 with a scale for each block), for engines that hold them so.

    pieces of all sources ─▶ the bucket as the plan has it, beside the message ─▶ codes, scales ─▶ message ─▶ seal

The plan, the exchange between trainer ranks and the protocol are those of plain weights. A sender that has put a bucket
together codes it. A block has to lie in one bucket whole, so the plan cuts tensors between rows of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.weights.fill import Arrival, WeightFiller
from moe_asyncrl.weights.letters import Letter
from moe_asyncrl.weights.message import Kind, dense_header, payload_start, payload_view
from moe_asyncrl.weights.message_part import Part, part_view, place_parts
from moe_asyncrl.weights.work import Message


class Coder(Protocol):
    """A form that weights are stored and served in: see `checkpoint.formats.encode.Fp8`."""

    @property
    def rows(self) -> int:
        """Rows of a weight that share a scale."""
        ...

    def stored_tensors(self, tensors: Iterable[HfTensor]) -> list[HfTensor]:
        """Names, shapes and types of what becomes of these tensors. Raises UserError for a shape that does not fit."""
        ...

    def encode(self, name: str, value: torch.Tensor, first: int = 0) -> dict[str, torch.Tensor]:
        """What becomes of a tensor, or of its rows from `first`. Raises UserError for a value that it cannot hold."""
        ...


@dataclass(frozen=True, slots=True)
class Coded:
    """What becomes of one message of the plan."""

    plain: tuple[Part, ...]
    """Its parts, as they lie before they are coded."""
    plain_bytes: int
    """Of its payload."""
    parts: tuple[Part, ...]
    payload_bytes: int
    header: bytes


def coded_message(message: Message, coder: Coder) -> Coded:
    """Raises UserError, naming the tensor, where a block would be cut, or a tensor does not fit the form."""
    parts, payload_bytes = place_parts(coded for part in message.parts for coded in coded_parts(part, coder))
    return Coded(message.parts, message.payload_bytes, parts, payload_bytes, dense_header(parts))


def coded_parts(part: Part, coder: Coder) -> tuple[Part, ...]:
    """What becomes of a part; the offsets are still to be set. Raises as `coded_message` does."""
    stored = coder.stored_tensors([HfTensor(part.name, part.shape, part.dtype)])
    if len(stored) == 1:
        return (part,)
    step = _rows_a_scale(part.shape, coder)
    (start, stop, stride), *more = part.ranges
    whole_rows = stride == 1 and all(r == (0, n, 1) for r, n in zip(more, part.shape[1:], strict=True))
    if not whole_rows or start % step or (stop % step and stop != part.shape[0]):
        raise UserError(
            f"weights.bucket_mib is too small: {part.name} {list(part.shape)} is quantised in blocks, and a row of "
            "blocks does not fit a bucket; set it higher"
        )
    found = []
    for tensor in stored:
        each = 1 if tensor.shape == part.shape else step
        ranges = ((start // each, -(-stop // each), 1), *((0, n, 1) for n in tensor.shape[1:]))
        found.append(Part(tensor.name, str(tensor.dtype), tensor.shape, ranges, 0))
    return tuple(found)


def encode_payload(coded: Coded, plain: torch.Tensor, into: torch.Tensor, coder: Coder) -> None:
    """Code a payload [plain_bytes] into another one [payload_bytes], both uint8. Raises UserError as `encode` does."""
    targets = {part.name: part for part in coded.parts}
    for part in coded.plain:
        # On the host: the form's arithmetic is the one that checkpoints are written with, bit for bit.
        value = part_view(part, plain).cpu()
        first = part.ranges[0][0] if part.ranges else 0
        for name, found in coder.encode(part.name, value, first).items():
            part_view(targets[name], into).copy_(found)


class CodedFiller:
    """All weights, coded. Takes the memory of one bucket more than plain weights."""

    kind: Kind = "dense"

    def __init__(self, plain: WeightFiller, coded: Sequence[Coded], coder: Coder) -> None:
        """`coded`: of this rank's messages, by round."""
        self._plain, self._coded, self._coder = plain, coded, coder
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def gives(self, turn: int, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        """See Filler."""
        return self._plain.gives(turn, device)

    def begin(self, turn: int, letter: Letter, message: torch.Tensor) -> None:
        """See Filler."""
        nbytes = payload_start(self._plain.headers[turn]) + self._coded[turn].plain_bytes
        self._bucket = torch.empty(nbytes, dtype=torch.uint8, device=message.device)
        self._plain.begin(turn, letter, self._bucket)

    def arrivals(self, turn: int, letter: Letter, message: torch.Tensor) -> list[Arrival]:
        """See Filler."""
        return self._plain.arrivals(turn, letter, self._bucket)

    def end(self, turn: int, arrival: Arrival, message: torch.Tensor) -> None:
        """See Filler."""
        self._plain.end(turn, arrival, self._bucket)

    def header(self, turn: int, letter: Letter, message: torch.Tensor) -> bytes:
        """See Filler. Codes the bucket, which is complete now."""
        coded = self._coded[turn]
        plain = payload_view(self._bucket, self._plain.headers[turn])
        encode_payload(coded, plain, payload_view(message, coded.header), self._coder)
        return coded.header


def letter_of(rank: int, message: Message, coded: Coded) -> Letter:
    """What a sender announces of a coded message."""
    nbytes = payload_start(coded.header) + coded.payload_bytes
    return Letter(rank, message.stream, -1, nbytes, len(coded.header))


def _rows_a_scale(shape: tuple[int, ...], coder: Coder) -> int:
    """Entries of the first axis for one entry of the scales' first axis: a stack of weights has a scale for each."""
    return coder.rows if len(shape) == 2 else 1
