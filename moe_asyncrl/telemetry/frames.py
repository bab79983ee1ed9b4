"""JSON lines as columns, a block at a time: millions of lines in seconds, in bounded memory. Needs polars."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import polars as pl

BLOCK = 2 * 1024 * 1024
"""Bytes that are read and parsed at once: measured, larger ones are slower."""
SMALL = 32 * 1024 * 1024
"""Files up to so many bytes are read whole where a part of their lines would do."""

Schema = Mapping[str, Any]
"""Field -> polars type. Fields that are not named are not read."""


def frames(path: Path, schema: Schema, *, start: int = 0, block: int = BLOCK) -> Iterator[pl.DataFrame]:
    """The whole lines of a file from byte `start`, in order; none if there is no file.

    A field that a line lacks is null. A last line without its end, and lines that do not fit the schema (a process died
    while it wrote), are passed over. `start` must be the start of a line.
    """
    if not path.exists():
        return
    # One block is parsed while the caller works on the one before: polars lets go of the interpreter's lock.
    with path.open("rb") as f, ThreadPoolExecutor(1) as ahead:
        f.seek(start)
        coming = ahead.submit(_next, f, schema, block)
        while (found := coming.result()) is not None:
            coming = ahead.submit(_next, f, schema, block)
            yield found


def _next(f: BinaryIO, schema: Schema, block: int) -> pl.DataFrame | None:
    data = f.read(block)
    if len(data) == block:
        data += f.readline()
    if not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
    return parse(data, schema) if data else None


def frame(path: Path, schema: Schema) -> pl.DataFrame:
    """All of a file at once."""
    found = list(frames(path, schema))
    return pl.concat(found) if found else pl.DataFrame(schema=schema)


def parse(lines: bytes, schema: Schema) -> pl.DataFrame:
    """Whole lines as columns."""
    try:
        return pl.read_ndjson(lines, schema=schema, ignore_errors=True)
    except pl.exceptions.PolarsError:
        return pl.read_ndjson(_sound(lines), schema=schema, ignore_errors=True)


def _sound(lines: bytes) -> bytes:
    """Only the lines that hold a JSON object."""
    found = []
    for line in lines.splitlines():
        try:
            if isinstance(msgspec.json.decode(line), dict):
                found.append(line)
        except msgspec.DecodeError:
            continue
    return b"\n".join(found)


def sampled_lines(path: Path, most: int, *, whole_below: int = SMALL) -> list[dict[str, Any]]:
    """Records spread evenly over a file, its last one among them: at most `most`, or all of a small file."""
    if not path.exists():
        return []
    size = path.stat().st_size
    with path.open("rb") as f:
        if size <= whole_below:
            lines = f.read().split(b"\n")[:-1]
            step = max(1, -(-len(lines) // most))
            lines = lines[::-step][::-1]
        else:
            lines = []
            at = 0
            for place in range(0, size, -(-size // most)):
                if place < at:
                    continue
                f.seek(place)
                if place:
                    f.readline()
                lines.append(f.readline())
                at = f.tell()
            lines.append(_last_line(path, size))
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(record, dict) and (not found or record != found[-1]):
            found.append(record)
    return found


def _last_line(path: Path, size: int, look_back: int = SMALL) -> bytes:
    with path.open("rb") as f:
        f.seek(max(0, size - look_back), os.SEEK_SET)
        whole = f.read()
    return whole[: whole.rfind(b"\n")].rpartition(b"\n")[2]
