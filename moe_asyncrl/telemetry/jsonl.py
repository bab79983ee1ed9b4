"""Append-only JSON lines that several processes may write to at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


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
    """Reads records that were appended since the last call; a line that is still being written waits for the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New records, in order."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as f:
            f.seek(self._offset)
            block = f.read()
        end = block.rfind(b"\n") + 1
        self._offset += end
        return [msgspec.json.decode(line) for line in block[:end].splitlines() if line.strip()]


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """All complete records of a file, one at a time."""
    if not path.exists():
        return
    with path.open("rb") as f:
        for line in f:
            if line.endswith(b"\n") and line.strip():
                yield msgspec.json.decode(line)
