"""Messages <-> ZeroMQ parts: one msgpack part, then raw frames."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from moe_asyncrl.data.errors import StaleEpoch, UserError
from moe_asyncrl.data.messages import AnyReply, AnyRequest, Message, Refused, Reply
from moe_asyncrl.data.wire import Frame

R = TypeVar("R", bound=Reply)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)

NOT_A_MESSAGE = (ValueError, msgspec.MsgspecError, RecursionError)
"""What decoding raises for bytes that are none of ours; the last one for thousands of nested brackets."""


class RequestRefused(UserError):
    """The buffer did not do what was asked. `code` is one of `Refused.code` (a stale epoch raises `StaleEpoch`)."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def encode(message: Message) -> bytes:
    """One message as msgpack; the name of its type is inside."""
    return _encoder.encode(message)


def decode_request(part: Frame) -> AnyRequest:
    """Raises one of `NOT_A_MESSAGE` for anything but a request."""
    return _requests.decode(part)


def decode_reply(part: Frame) -> AnyReply:
    """Raises one of `NOT_A_MESSAGE` for anything but a reply."""
    return _replies.decode(part)


def request_number(part: Frame) -> int:
    """The number inside a request that could not be decoded, so that its sender learns of it; 0 if there is none."""
    try:
        loose = msgspec.msgpack.decode(part)
    except NOT_A_MESSAGE:
        return 0
    number = loose.get("request", 0) if isinstance(loose, dict) else 0
    return number if isinstance(number, int) else 0


def expect(reply: Reply, kind: type[R]) -> R:
    """The reply, which must be of that kind.

    Raises:
        StaleEpoch: another process owns the run now.
        RequestRefused: the buffer said no.
    """
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Refused):
        if reply.code == "stale_epoch":
            raise StaleEpoch(reply.reason)
        raise RequestRefused(reply.code, f"the buffer refused: {reply.reason}")
    raise RequestRefused("bad_request", f"the buffer answered {type(reply).__name__}, which was not asked for")
