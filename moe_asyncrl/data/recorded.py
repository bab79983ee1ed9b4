"""Trained groups on disk: `trajectories/NNNNNNNN.groups`, whole trajectories in the wire format, append-only.

A file is a row of records; a record is a fixed head, a msgpack header (the step and the trajectories' wire headers) and
their frames. A record that a dying process left half-written is the last one of its file, as every writer begins a file
of its own, and is passed over by readers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from moe_asyncrl.data.group_wire import decode_group
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import Frame, TrajectoryHeader, check_header

MAGIC = b"moegrp1\n"
HEAD = struct.Struct("<8sIQQQ")
"""Magic, bytes of the header, bytes of the frames, and the xxh3 digests (64 bits) of both."""
SUFFIX = ".groups"


class RecordedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a record: one group and the step that trained on it."""

    step: int
    version: int
    """Weights that the step began with; less that of a trajectory's oldest token it is its staleness."""
    index: int
    attempt: int
    time: float
    """When the step was done, Unix seconds."""
    headers: tuple[TrajectoryHeader, ...]


@dataclass(frozen=True)
class Recorded:
    """A record found in a file. Its frames are read when they are asked for."""

    group: RecordedGroup
    path: Path
    at: int
    """Where its frames begin in the file."""
    size: int
    digest: int

    def trajectories(self) -> tuple[Trajectory, ...]:
        """The group's trajectories, whole. Raises `ContractViolation` if the frames are damaged, OSError if gone."""
        with self.path.open("rb") as f:
            f.seek(self.at)
            body = f.read(self.size)
        if xxhash.xxh3_64_intdigest(body) != self.digest:
            raise ContractViolation(f"{self.path}: the frames of group {self.group.index} are damaged")
        view, at = memoryview(body), 0
        frames: list[Frame] = []
        for header in self.group.headers:
            check_header(header)
            for spec in header.frames:
                frames.append(view[at : at + spec.nbytes])
                at += spec.nbytes
        return decode_group(self.group.headers, frames)


def encode_record(group: RecordedGroup, frames: list[Frame]) -> list[Frame]:
    """The parts of a record, to be written one after the other. `frames`: of all trajectories, in header order."""
    header = msgspec.msgpack.encode(group)
    body = xxhash.xxh3_64()
    size = 0
    for frame in frames:
        body.update(frame)
        size += len(frame)
    return [HEAD.pack(MAGIC, len(header), size, xxhash.xxh3_64_intdigest(header), body.intdigest()), header, *frames]


def files_in(folder: Path) -> list[Path]:
    """The files of records, oldest first."""
    return sorted(p for p in folder.glob(f"*{SUFFIX}") if p.stem.isdigit())


def newest_first(folder: Path) -> Iterator[Recorded]:
    """All whole records, the newest one first. A file that is dropped meanwhile, and what is damaged, is left out."""
    for path in reversed(files_in(folder)):
        try:
            found = list(records_of(path))
        except FileNotFoundError:
            continue
        yield from reversed(found)


def records_of(path: Path) -> Iterator[Recorded]:
    """The whole records of a file, in order; ends before the first one that is torn or damaged."""
    size = path.stat().st_size
    with path.open("rb") as f:
        while len(head := f.read(HEAD.size)) == HEAD.size:
            magic, header_size, body_size, header_digest, body_digest = HEAD.unpack(head)
            at = f.tell() + header_size
            if magic != MAGIC or at + body_size > size:
                return
            header = f.read(header_size)
            if xxhash.xxh3_64_intdigest(header) != header_digest:
                return
            try:
                group = msgspec.msgpack.decode(header, type=RecordedGroup)
            except msgspec.MsgspecError:
                return
            yield Recorded(group, path, at, body_size, body_digest)
            f.seek(at + body_size)
