"""Carries out units: copies bytes from file to file, or puts arrays together from rectangles of stored ones.

Plain runs are copied inside the kernel. Everything else goes through arrays that are views of mapped files, so that
only the piece at hand is in memory.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_asyncrl.checkpoint.convert.casts import cast
from moe_asyncrl.checkpoint.convert.program import Content, Part, Run, WriteUnit
from moe_asyncrl.checkpoint.convert.stores import Stores, raw_type
from moe_asyncrl.checkpoint.convert.torch_zip import frame
from moe_asyncrl.data.errors import UserError

if TYPE_CHECKING:
    import numpy as np

_STEP = 8 << 20
_AHEAD = 32 << 20
_NOT_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class Files:
    """The open files of one unit. Use as a context manager."""

    def __init__(self, names: Sequence[str], stores: Stores) -> None:
        self.names, self.stores = names, stores
        self._handles: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._maps.clear()  # closed with the last view of each

    def handle(self, number: int) -> int:
        """A file's descriptor, for reading."""
        if number not in self._handles:
            self._handles[number] = os.open(self.names[number], os.O_RDONLY)
        return self._handles[number]

    def array(self, part: Part, item: int) -> np.ndarray[Any, Any]:
        """The rectangle `taken`, in the stored array's own axes, as raw items."""
        import numpy as np

        taken = tuple(slice(*axis) for axis in part.taken)
        if part.offset < 0:
            return self.stores.read(Path(self.names[part.file]).parent, part.name, taken)
        if part.file not in self._maps:
            self._maps[part.file] = mmap.mmap(self.handle(part.file), 0, access=mmap.ACCESS_READ)
        if part.offset + math.prod(part.shape) * item > len(self._maps[part.file]):
            raise UserError(f"{self.names[part.file]} has become shorter since it was looked at")
        stored = np.ndarray(part.shape, raw_type(item), buffer=self._maps[part.file], offset=part.offset)
        return stored[taken]


def assembled(content: Content, files: Files) -> np.ndarray[Any, Any]:
    """The content as an array of raw items, of the type that is wanted."""
    found = _as_stored(content, files)
    return found if content.types is None else cast(found, *content.types)


def _as_stored(content: Content, files: Files) -> np.ndarray[Any, Any]:
    import numpy as np

    if content.runs:
        buffer = bytearray(math.prod(content.shape) * content.item)
        view, at = memoryview(buffer), 0
        for run in content.runs:
            _read_into(files, run, view[at : at + run.size])
            at += run.size
        return np.frombuffer(buffer, raw_type(content.item)).reshape(content.shape)
    out = np.empty(content.shape, raw_type(content.item))
    for part in content.parts:
        value = files.array(part, content.item)
        used = [axis for axis in part.order if axis >= 0]
        value = value[tuple(slice(None) if axis in used else 0 for axis in range(value.ndim))]
        kept = sorted(used)
        value = value.transpose([kept.index(axis) for axis in used])
        for axis, source in enumerate(part.order):
            if source < 0:
                value = np.expand_dims(value, axis)
        out[tuple(slice(*axis) for axis in part.placed)] = value
    return out


def write_unit(unit: WriteUnit, moved: Callable[[int], None], stores: Stores) -> None:
    """Write all pieces of a unit and bring them to the disk. `moved` is told of bytes as they are written.

    Raises:
        OSError: the disk is full, a file cannot be read or written.
        UserError: a source has become shorter.
    """
    with Files(unit.files, stores) as files:
        target = os.open(unit.target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            ahead = _Ahead(files, [run for piece in unit.pieces for run in piece.content.runs])
            begun = end = unit.pieces[0].at
            for piece in unit.pieces:
                ahead.past(sum(run.size for run in piece.content.runs))
                at = piece.at
                around = frame(piece.framed, piece.shape) if piece.framed else None
                if around is not None:
                    at += _write(target, around.head, at)
                if piece.encoded is None:
                    size = _write_content(target, piece.content, files, at)
                else:
                    folder = Path(unit.files[piece.encoded.folder])
                    size = _write(target, stores.encode(folder, piece.encoded, assembled(piece.content, files)), at)
                end = at + size
                if around is not None:
                    end += _write(target, around.tail, end)
                if end - begun >= _STEP:
                    # The kernel begins to write this back now, and not all of it at the end.
                    os.posix_fadvise(target, begun, end - begun, os.POSIX_FADV_DONTNEED)
                    begun = end
                moved(size)
            if os.fstat(target).st_size < unit.size:
                os.truncate(target, unit.size)
            os.fsync(target)
        finally:
            os.close(target)


def _write_content(target: int, content: Content, files: Files, at: int) -> int:
    if not content.runs or content.types is not None:
        return _write(target, assembled(content, files).data.cast("B"), at)
    begin = at
    for run in content.runs:
        _copy(files, run, target, at)
        at += run.size
    return at - begin


class _Ahead:
    """Lets the kernel read what comes next: runs of a few megabytes, anywhere, are too short for it to find out."""

    def __init__(self, files: Files, runs: Iterable[Run]) -> None:
        self._files, self._runs = files, iter(runs)
        self._asked = 0

    def past(self, size: int) -> None:
        """`size` more bytes are about to be used; have up to `_AHEAD` behind them on their way."""
        self._asked -= size
        while self._asked < _AHEAD:
            run = next(self._runs, None)
            if run is None:
                return
            os.posix_fadvise(self._files.handle(run.file), run.offset, run.size, os.POSIX_FADV_WILLNEED)
            self._asked += run.size


def _copy(files: Files, run: Run, target: int, at: int) -> None:
    source, done = files.handle(run.file), 0
    in_kernel = True
    buffer: memoryview | None = None
    while done < run.size:
        step = min(_STEP, run.size - done)
        if in_kernel:
            try:
                copied = os.copy_file_range(source, target, step, run.offset + done, at + done)
            except OSError as error:
                if error.errno not in _NOT_IN_KERNEL:
                    raise
                in_kernel = False
                continue
        else:
            buffer = buffer or memoryview(bytearray(_STEP))
            copied = os.preadv(source, [buffer[:step]], run.offset + done)
            _write(target, buffer[:copied], at + done)
        if copied == 0:
            raise UserError(f"{files.names[run.file]} has become shorter since it was looked at")
        done += copied


def _read_into(files: Files, run: Run, view: memoryview) -> None:
    done = 0
    while done < run.size:
        found = os.preadv(files.handle(run.file), [view[done : done + _STEP]], run.offset + done)
        if found == 0:
            raise UserError(f"{files.names[run.file]} has become shorter since it was looked at")
        done += found


def _write(target: int, data: bytes | memoryview, at: int) -> int:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(target, view[done : done + _STEP], at + done)
    return done
