"""Append-only JSON lines that several processes may write to at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

LOOK_BACK = 64 * 1024
"""Bytes read at once when the last line's end is looked for."""


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


class JsonlWriter:
    """Appends one object a line. Each line is one write to a file opened with O_APPEND, so lines never interleave."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._fd: int | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Write one record. Not-a-number becomes null, as JSON has no other word for it."""
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(self._fd, self._encoder.encode(record) + b"\n")

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class JsonlTail:
    """Reads records that were appended since the last call; a line that is still being written waits for the next.

    A line that is no JSON object is passed over and counted: whoever looks on must not fall over it.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        """Begin at byte `offset`, which must be the start of a line."""
        self._path = path
        self.offset = offset
        """Start of the first line that was not read yet, in bytes."""
        self.bad = 0
        """Lines that were passed over."""

    @classmethod
    def from_end(cls, path: Path, *, last_bytes: int = 0) -> JsonlTail:
        """Begin with the first line that starts in the last `last_bytes` bytes; with 0, behind the last whole line."""
        if not path.exists():
            return cls(path)
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            if last_bytes >= size:
                return cls(path)
            if last_bytes > 0:
                # The byte before tells whether the place is the start of a line.
                f.seek(size - last_bytes - 1)
                f.readline(last_bytes + 1)
                return cls(path, offset=f.tell())
            at = size
            while at > 0:
                block = min(at, LOOK_BACK)
                f.seek(at - block)
                newline = f.read(block).rfind(b"\n")
                if newline >= 0:
                    return cls(path, offset=at - block + newline + 1)
                at -= block
            return cls(path)

    def read(self, limit: int | None = None, *, only: bytes | None = None) -> list[dict[str, Any]]:
        """New records, in order; with `limit`, those in about so many bytes (0 records: nothing new).

        Lines without the bytes `only` are passed over before they are read as JSON.
        """
        try:
            with self._path.open("rb") as f:
                f.seek(self.offset)
                block = f.read(limit) if limit is not None else f.read()
                if limit is not None and len(block) == limit:
                    block += f.readline()
        except FileNotFoundError:
            return []
        end = block.rfind(b"\n") + 1
        self.offset += end
        found = []
        for line in block[:end].splitlines():
            if only is not None and only not in line:
                continue
            try:
                record = msgspec.json.decode(line)
            except msgspec.DecodeError:
                record = None
            if isinstance(record, dict):
                found.append(record)
            elif line.strip():
                self.bad += 1
        return found


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """All complete records of a file, one at a time."""
    if not path.exists():
        return
    with path.open("rb") as f:
        for line in f:
            if line.endswith(b"\n") and line.strip():
                yield msgspec.json.decode(line)
