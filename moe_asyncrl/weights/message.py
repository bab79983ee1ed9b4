"""The message of a weight update: what every transport carries, self-describing, of a size known before it is sent.

    prefix, 64 bytes | header: msgpack, a list of `Part` | zeros to a multiple of 64 | payload

The prefix (little-endian) has magic, schema, kind, epoch, version, stream, number, the sizes of header and payload, and
the digest: xxh3-128 over all of the message but the digest's own 16 bytes. So it covers values, names, shapes, version,
epoch and the place in the stream. It finds damage and mix-ups; it does not prove who sent.

A *stream* is the ordered messages from one trainer rank, the sender, to one set of engine ranks. To write a message:

    header = dense_header(parts)
    buffer = torch.empty(message_bytes(header, payload_bytes), dtype=torch.uint8)
    ...  # write the payload into payload_view(buffer, header)
    digest = seal(buffer, kind="dense", epoch=1, version=7, stream=0, number=3, header=header)

To read one: `open_message`, which checks all of it. Neither copies the payload. `message_device` is for GPU buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
import torch
import xxhash

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.weights.message_part import Part, check_parts
from moe_asyncrl.weights.plan_units import aligned

Kind = Literal["dense", "sparse"]
KINDS: tuple[Kind, ...] = ("dense", "sparse")

MAGIC = b"MOEWMSG\n"
SCHEMA = 1
_PREFIX = struct.Struct("<8sHHIiIIIQ8s16s")
PREFIX_BYTES = _PREFIX.size
_DIGEST_AT = PREFIX_BYTES - 16
_PARTS = msgspec.msgpack.Decoder(tuple[Part, ...])

Buffer = TypeVar("Buffer", torch.Tensor, Any)
"""A uint8 CPU tensor or NumPy array [bytes], contiguous, or whatever else has the buffer protocol: mmap, bytearray."""


class BadMessage(UserError):
    """A message that must not be loaded. The text names the sender, the number, the first tensor and what is wrong."""


@dataclass(frozen=True)
class Opened(Generic[Buffer]):
    """A message that has passed every check."""

    kind: Kind
    parts: tuple[Part, ...]
    payload: Buffer
    """A view of the message's buffer, of the same kind (memoryview for what is neither tensor nor array)."""
    digest: bytes
    """16 bytes, for `StreamDigest.add`."""


def dense_header(parts: Sequence[Part]) -> bytes:
    """The header of a message that holds every element of its parts. Raises ValueError: see `check_parts`."""
    check_parts(parts, sparse=False)
    return msgspec.msgpack.encode(parts)


def sparse_header(parts: Sequence[Part]) -> bytes:
    """The header of a message of changes: each part has `encoded_bytes`. Raises ValueError: see `check_parts`."""
    check_parts(parts, sparse=True)
    return msgspec.msgpack.encode(parts)


def payload_start(header: bytes) -> int:
    """Byte of the message at which the payload begins."""
    return aligned(PREFIX_BYTES + len(header))


def message_bytes(header: bytes, payload_bytes: int) -> int:
    """Size of the whole message."""
    return payload_start(header) + payload_bytes


def payload_view(buffer: Buffer, header: bytes) -> Buffer:
    """Where the payload goes in the buffer of a message with this header: a view to write into."""
    return _sliced(buffer, payload_start(header))


def seal(buffer: Buffer, *, kind: Kind, epoch: int, version: int, stream: int, number: int, header: bytes) -> bytes:
    """Write prefix and header in front of a payload that is already there. Returns the digest, 16 bytes.

    Takes one pass over the bytes, on the calling thread.

    Raises:
        ValueError: the buffer is not writable host memory, or too short for the header.
        struct.error: a number that does not fit its field.
    """
    view, start = host_bytes(buffer), payload_start(header)
    if len(view) < start:
        raise ValueError(f"a buffer of {len(view)} bytes has no room for a prefix and a header, {start} bytes")
    fields = (MAGIC, SCHEMA, KINDS.index(kind), epoch, version, stream, number, len(header), len(view) - start)
    _PREFIX.pack_into(view, 0, *fields, bytes(8), bytes(16))
    view[PREFIX_BYTES:start] = header.ljust(start - PREFIX_BYTES, b"\0")
    digest = _digest(view)
    view[_DIGEST_AT:PREFIX_BYTES] = digest
    return digest


def open_message(
    buffer: Buffer, *, epoch: int, version: int, stream: int, number: int, sender: int | None = None
) -> Opened[Buffer]:
    """Check all of a message and say what is in it. Nothing of a message may be loaded before.

    Args:
        buffer: the whole message and nothing else.
        epoch, version, stream, number: what the receiver expects.
        sender: trainer rank, for the text of errors; None: streams are numbered by their senders.

    Raises:
        BadMessage: anything is not as it must be.
    """
    view = host_bytes(buffer)
    sender = stream if sender is None else sender
    where = f"message {number} of version {version} from trainer rank {sender}"
    if len(view) < PREFIX_BYTES:
        raise BadMessage(f"{where} has {len(view)} bytes, fewer than its prefix")
    magic, schema, kind, *found, header_bytes, payload_bytes, _, digest = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BadMessage(f"{where} is damaged or is no message of a weight update: it begins with {bytes(magic)!r}")
    if schema != SCHEMA:
        raise BadMessage(
            f"{where} has schema {schema}, this process reads {SCHEMA}: it is damaged, or trainer and engine run "
            "different releases of moe-asyncrl"
        )
    start = aligned(PREFIX_BYTES + header_bytes)
    if start + payload_bytes != len(view):
        raise BadMessage(f"{where} says it has {start + payload_bytes} bytes and has {len(view)}: cut short or damaged")
    header = view[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
    if _digest(view) != digest:
        raise BadMessage(f"{where} is damaged on its way: its digest does not fit its bytes ({_first(header)})")
    expected = {"epoch": epoch, "version": version, "stream": stream, "number": number}
    wrong = [
        f"{name} {there} in place of {right}"
        for (name, right), there in zip(expected.items(), found, strict=True)
        if there != right
    ]
    if wrong:
        raise BadMessage(f"{where} is another one: it has {', '.join(wrong)} ({_first(header)})")
    if kind >= len(KINDS):
        raise BadMessage(f"{where} is of the unknown kind {kind} ({_first(header)})")
    try:
        parts = _PARTS.decode(header)
        check_parts(parts, sparse=KINDS[kind] == "sparse", payload_bytes=payload_bytes)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadMessage(f"{where} has a header that makes no sense: {error} ({_first(header)})") from error
    return Opened(KINDS[kind], parts, _sliced(buffer, start), bytes(digest))


def host_bytes(buffer: Any) -> memoryview:
    """The buffer's bytes, without a copy. Raises ValueError unless it is contiguous host memory of uint8."""
    if isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu" or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(
                f"a message needs contiguous host memory of uint8, not {buffer.dtype} on {buffer.device} with strides "
                f"{buffer.stride()}; for the memory of a GPU see weights/message_device.py"
            )
        buffer = buffer.detach().numpy()
    view = memoryview(buffer)
    if view.format not in ("B", "b", "c") or view.ndim != 1 or not view.c_contiguous:
        raise ValueError(f"a message needs contiguous bytes, not a buffer of format {view.format}, {view.ndim} axes")
    return view.cast("B")


def _digest(view: memoryview) -> bytes:
    h = xxhash.xxh3_128()
    h.update(view[:_DIGEST_AT])
    h.update(view[PREFIX_BYTES:])
    return h.digest()


def _sliced(buffer: Any, start: int) -> Any:
    return buffer[start:] if hasattr(buffer, "dtype") else host_bytes(buffer)[start:]


def _first(header: memoryview) -> str:
    """For messages about a message that may be damaged: its first tensor, as far as it can be read."""
    try:
        parts = _PARTS.decode(header)
    except (msgspec.DecodeError, ValueError):
        return "its header cannot be read"
    return f"first tensor {parts[0].name}" if parts else "no tensor"
