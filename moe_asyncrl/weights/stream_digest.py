"""Digests over the messages of a stream in their order, and over all streams of an update."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

DIGEST_BYTES = 16


class StreamDigest:
    """Chains the digests of a stream's messages: xxh3-128 of what was so far and of the next, from 16 zeros on.

    Both sides keep one for each stream: equal values mean the same messages in the same order.
    """

    def __init__(self) -> None:
        self._value = bytes(DIGEST_BYTES)
        self._count = 0

    def add(self, digest: bytes) -> None:
        """The digest of the next message: what `seal` and `open_message` give."""
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        self._value = xxhash.xxh3_128_digest(self._value + digest)
        self._count += 1

    @property
    def count(self) -> int:
        """How many messages it stands for."""
        return self._count

    @property
    def value(self) -> str:
        """32 hexadecimal digits."""
        return self._value.hex()


def manifest_digest(streams: Mapping[int, str]) -> str:
    """One digest for an update: over each stream's number and `StreamDigest.value`, in the order of the numbers."""
    h = xxhash.xxh3_128()
    for number in sorted(streams):
        h.update(number.to_bytes(4, "little"))
        h.update(bytes.fromhex(streams[number]))
    return h.hexdigest()
