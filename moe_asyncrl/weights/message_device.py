"""Messages in the memory of a GPU: the digest is taken of a copy on the host, since hashing is work for a CPU.

`host` is a uint8 CPU tensor [at least the message's bytes], best pinned, and the caller's to use again once the
function has returned. On the CPU, `buffer` may itself be a CPU tensor: the functions do the same there.
"""

from __future__ import annotations

import torch

from moe_asyncrl.weights.message import Kind, Opened, open_message, payload_start, seal


def seal_on_device(
    buffer: torch.Tensor,
    host: torch.Tensor,
    *,
    kind: Kind,
    epoch: int,
    version: int,
    stream: int,
    number: int,
    header: bytes,
) -> bytes:
    """`message.seal` for a message whose payload lies in GPU memory. Returns the digest, 16 bytes.

    Waits for what the current stream has queued on the buffer. Afterwards `host` holds the whole message too.
    Raises ValueError: `host` is too short; or as `message.seal`.
    """
    copy, start = _room(buffer, host), payload_start(header)
    copy[start:].copy_(buffer[start:])
    digest = seal(copy, kind=kind, epoch=epoch, version=version, stream=stream, number=number, header=header)
    buffer[:start].copy_(copy[:start])
    return digest


def open_on_device(
    buffer: torch.Tensor,
    host: torch.Tensor,
    *,
    epoch: int,
    version: int,
    stream: int,
    number: int,
    sender: int | None = None,
) -> Opened[torch.Tensor]:
    """`message.open_message` for a message in GPU memory; the payload is a view of `buffer`.

    What is checked is the copy in `host`, which holds the whole message afterwards: decode sparse messages from there.
    Raises ValueError: `host` is too short. BadMessage: as `message.open_message`.
    """
    copy = _room(buffer, host)
    copy.copy_(buffer)
    checked = open_message(copy, epoch=epoch, version=version, stream=stream, number=number, sender=sender)
    return Opened(checked.kind, checked.parts, buffer[len(buffer) - len(checked.payload) :], checked.digest)


def _room(buffer: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    if len(host) < len(buffer):
        raise ValueError(f"the copy on the host has room for {len(host)} bytes, the message has {len(buffer)}")
    return host[: len(buffer)]
