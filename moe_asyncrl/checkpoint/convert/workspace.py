"""Where a conversion writes until it is whole: a hidden directory beside the place it will have, with a journal.

`.OUT.partial` holds the output as it grows and, in `.convert/`, what the conversion is of (`identity.json`) and which
units are done (`journal.jsonl`, a line each, written after the unit is on the disk). The same command goes on from
there; another one is refused. The last step gives the directory its name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.out_place import check_free
from moe_asyncrl.telemetry.run_folder import sync

_OWN, _IDENTITY, _JOURNAL = ".convert", "identity.json", "journal.jsonl"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversion is of: two of the same identity write the same bytes."""

    direction: str
    source: dict[str, tuple[int, int]]
    """Size and time of change (ns) of each file that is read."""
    options: dict[str, Any]
    plan: str
    """Digest of the units."""


class Done(msgspec.Struct, frozen=True):
    """A line of the journal."""

    unit: int
    target: str
    size: int


class Workspace:
    """An open, locked workspace. `path` is where to write; `done` the units that need not be done again."""

    def __init__(self, out: Path, path: Path, lock: int) -> None:
        self.out, self.path = out, path
        self.done: set[int] = set()
        self._lock = lock
        self._journal = -1

    def bind(self, identity: Identity) -> None:
        """Start anew, or take up what the same conversion left.

        Raises:
            UserError: another conversion was interrupted here.
        """
        file = self.path / _OWN / _IDENTITY
        if file.is_file():
            self._check(file, identity)
            self._keep([done for done in self._read_journal() if self._is_there(done)])
        else:
            _write_file(file.with_suffix(".new"), msgspec.json.encode(identity))
            os.replace(file.with_suffix(".new"), file)
        if self._journal < 0:
            self._open_journal()

    def record(self, unit: int, target: str) -> None:
        """Say that a unit is on the disk. The line itself need not be: without it the unit is done again."""
        line = msgspec.json.encode(Done(unit, target, (self.path / target).stat().st_size)) + b"\n"
        _write_all(self._journal, line)
        self.done.add(unit)

    def forget(self, target: str) -> None:
        """All that was done of a file is to be done again, now and after any interruption."""
        kept = [done for done in self._read_journal() if done.unit in self.done and done.target != target]
        if len(kept) < len(self.done):
            self._keep(kept)

    def check_unchanged(self, paths: Iterable[Path], identity: Identity) -> None:
        """Raise UserError if one of the files that were read is not as it was when the conversion began."""
        changed = [path for path in sorted(set(paths)) if identity.source.get(path.name) != _stamp(path)]
        if changed:
            raise UserError(
                f"{changed[0]} was changed while it was converted, so what was written is of two checkpoints; remove "
                f"{self.path} and start anew"
            )

    def publish(self, others: Mapping[str, bytes]) -> None:
        """Write the remaining files and give the directory its name. Raises OSError if the disk is full."""
        for name, content in others.items():
            _write_file(self.path / name, content)
        for folder in {self.path, *((self.path / name).parent for name in others)}:
            sync(folder)
        os.rename(self.path, self.out)
        sync(self.out.parent)
        shutil.rmtree(self.out / _OWN)

    def leave(self) -> None:
        """Close the journal; remove the directory where nothing was begun in it."""
        if self._journal >= 0:
            os.close(self._journal)
        elif not (self.path / _OWN / _IDENTITY).is_file():
            shutil.rmtree(self.path, ignore_errors=True)

    def _is_there(self, done: Done) -> bool:
        path = self.path / done.target
        return path.is_file() and path.stat().st_size == done.size

    def _keep(self, kept: list[Done]) -> None:
        """A journal of these alone; without torn lines and units that are gone, which must not come back."""
        self.done = {done.unit for done in kept}
        path = self.path / _OWN / _JOURNAL
        _write_file(path.with_suffix(".new"), b"".join(msgspec.json.encode(done) + b"\n" for done in kept))
        os.replace(path.with_suffix(".new"), path)
        sync(path.parent)
        if self._journal >= 0:
            os.close(self._journal)
        self._open_journal()

    def _open_journal(self) -> None:
        self._journal = os.open(self.path / _OWN / _JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _read_journal(self) -> Iterator[Done]:
        path = self.path / _OWN / _JOURNAL
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                yield msgspec.json.decode(line, type=Done)
            except msgspec.MsgspecError:
                continue  # torn: the unit is done again

    def _check(self, file: Path, identity: Identity) -> None:
        again = f"repeat the command that was interrupted, or remove {self.path}"
        try:
            found = msgspec.json.decode(file.read_bytes(), type=Identity)
        except msgspec.MsgspecError as error:
            raise UserError(f"{file}: damaged ({error}); remove {self.path} and start anew") from error
        if found.direction != identity.direction or found.options != identity.options:
            raise UserError(f"{self.path} holds an interrupted conversion with other options; {again}")
        if found.source != identity.source:
            changed = sorted(
                name
                for name in found.source.keys() | identity.source.keys()
                if found.source.get(name) != identity.source.get(name)
            )
            raise UserError(
                f"{self.path} holds an interrupted conversion of other files ({len(changed)} differ, {changed[0]} "
                f"among them): the source has changed, or is another one; {again}"
            )
        if found.plan != identity.plan:
            raise UserError(
                f"{self.path} holds an interrupted conversion with another config, tokenizer or other small file, or "
                "of another version of this program; remove it and start anew"
            )


@contextmanager
def workspace(out: Path) -> Iterator[Workspace]:
    """The workspace of `out`, locked until the end. When the body raises, what was written stays, if there is anything.

    Raises:
        UserError: `out` is taken or cannot be written, or another process is converting into it.
    """
    path = out.parent / f".{out.name}.partial"
    try:
        check_free(out)
        if path.is_dir() and not (path / _OWN).is_dir():
            raise UserError(f"{path} is in the way, and is no interrupted conversion; move it, or choose another place")
        (path / _OWN).mkdir(parents=True, exist_ok=True)
        lock = os.open(path / _OWN / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another place") from None
    found: Workspace | None = None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is converting into {out} ({path} is locked)") from None
        found = Workspace(out, path, lock)
        yield found
    finally:
        if found is not None:
            found.leave()
        os.close(lock)


def source_files(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file, by name."""
    return {path.name: (stat.st_size, stat.st_mtime_ns) for path in sorted(set(paths)) for stat in (path.stat(),)}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    """A disk that is nearly full takes a part of a write; the next one says why."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]
