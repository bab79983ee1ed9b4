"""Routing rows as bytes, from the scheduler of an engine to the client that asked: named encodings.

| name | written by | holds |
|---|---|---|
| `int32` | SGLang itself | int32 [rows, all decoder layers, K], nothing else |
| `rows1` | our plugin, in the scheduler | MoE layers only, the smallest type; version and source of each row |

`rows1` begins with a mark that, read as int32, is no expert of any model, so an answer says itself which one it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.trajectory import RoutingRun, RoutingSource

Name = Literal["int32", "rows1"]
MARK = b"ROW1"
HEAD = struct.Struct("<4sIIHHB")
"""Mark, first row, rows, layers, K, bytes of an id; then the number of runs, layers (uint16), runs, ids."""
RUN = np.dtype([("end", "<u4"), ("version", "<i4"), ("source", "u1")])
SOURCES: tuple[RoutingSource, ...] = ("sampled", "prefilled", "cached", "missing")
"""A source is written as its place here."""
SAMPLED, PREFILLED, CACHED, MISSING = range(4)


@dataclasses.dataclass(frozen=True)
class EncodedRows:
    """What an engine says of the rows [start, start + n)."""

    start: int
    layers: npt.NDArray[np.uint16] | None
    """Decoder layers of the model that the rows have, in order; None for all."""
    experts: npt.NDArray[np.integer]
    """[n, layers, K]"""
    runs: tuple[RoutingRun, ...] | None
    """Version and source, counted from row 0 of the sequence; None where the engine does not say."""


class NotRows(ValueError):
    """Bytes that are not rows in the encoding that they claim."""


def encode_rows(
    start: int,
    layers: npt.NDArray[np.uint16],
    experts: npt.NDArray[np.integer],
    version: npt.NDArray[np.int32],
    source: npt.NDArray[np.int8],
) -> bytes:
    """`rows1`: experts [n, layers, K] of rows start, …; version int32 [n], source int8 [n] (places in SOURCES).

    Raises ValueError for an id that no model has.
    """
    n, count, k = experts.shape
    low, high = (int(experts.min()), int(experts.max())) if experts.size else (0, 0)
    if low < 0 or high > 0xFFFF or len(layers) != count or len(version) != n or len(source) != n:
        raise ValueError(f"{n} rows of {count} layers with ids from {low} to {high} cannot be written")
    dtype = np.dtype("u1") if high <= 0xFF else np.dtype("<u2")
    edges = run_edges(version, source)
    runs = np.empty(len(edges) - 1, dtype=RUN)
    runs["end"], runs["version"], runs["source"] = edges[1:], version[edges[:-1]], source[edges[:-1]]
    head = HEAD.pack(MARK, start, n, count, k, dtype.itemsize) + struct.pack("<I", len(runs))
    return b"".join((head, layers.astype("<u2").tobytes(), runs.tobytes(), experts.astype(dtype).tobytes()))


def decode_rows(data: bytes, *, rows: int, layers: int, k: int) -> EncodedRows:
    """The rows of an answer that should hold `rows` of them, of a model with `layers` decoder layers.

    Raises NotRows for any other size or count.
    """
    if not data.startswith(MARK):
        if len(data) != 4 * rows * layers * k:
            raise NotRows(f"has {len(data) / 4:g} ids, {rows} rows x {layers} layers x {k} were due")
        return EncodedRows(0, None, np.frombuffer(data, dtype="<i4").reshape(rows, layers, k), None)
    try:
        _, start, n, count, own_k, size = HEAD.unpack_from(data)
        (parts,) = struct.unpack_from("<I", data, HEAD.size)
    except struct.error:
        raise NotRows(f"ends after {len(data)} bytes") from None
    at = HEAD.size + 4
    due = at + 2 * count + RUN.itemsize * parts + n * count * own_k * size
    if size not in (1, 2) or len(data) != due or n != rows or own_k != k:
        raise NotRows(f"has {n} rows x {count} layers x {own_k} in {len(data)} bytes, {rows} rows x {k} were due")
    own = np.frombuffer(data, dtype="<u2", count=count, offset=at)
    at += 2 * count
    runs = np.frombuffer(data, dtype=RUN, count=parts, offset=at)
    at += RUN.itemsize * parts
    ends = runs["end"].tolist()
    if ends != sorted(set(ends)) or (ends[-1:] or [0]) != [n] or (n and (ends[0] == 0 or runs["source"].max() > 3)):
        raise NotRows(f"says where {n} rows come from by the runs {ends}")
    experts = np.frombuffer(data, dtype="u1" if size == 1 else "<u2", offset=at).reshape(n, count, k)
    found = tuple(
        RoutingRun(start=start + a, end=start + b, version=int(v), source=SOURCES[s])
        for (a, b), v, s in zip(itertools.pairwise([0, *ends]), runs["version"], runs["source"], strict=True)
    )
    return EncodedRows(start, own, experts, found)


def run_edges(version: npt.NDArray[np.int32], source: npt.NDArray[np.int8]) -> Sequence[int]:
    """Where runs of one version and source begin, and where the last one ends."""
    if not len(version):
        return [0]
    changes = np.flatnonzero((np.diff(source) != 0) | (np.diff(version) != 0)) + 1
    return [0, *changes.tolist(), len(source)]


def runs_of(version: npt.NDArray[np.int32], source: npt.NDArray[np.int8], *, start: int = 0) -> tuple[RoutingRun, ...]:
    """Version and source of each row as runs, counted from `start`."""
    return tuple(
        RoutingRun(start=start + a, end=start + b, version=int(version[a]), source=SOURCES[source[a]])
        for a, b in itertools.pairwise(run_edges(version, source))
    )


def expand(runs: Sequence[RoutingRun]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int8]]:
    """The inverse: version int32 [n] and source int8 [n] of the rows that the runs cover."""
    lengths = np.asarray([r.end - r.start for r in runs], dtype=np.int64)
    version = np.repeat(np.asarray([r.version for r in runs], dtype=np.int32), lengths)
    source = np.repeat(np.asarray([SOURCES.index(r.source) for r in runs], dtype=np.int8), lengths)
    return version, source
