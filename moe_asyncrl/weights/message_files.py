"""Messages as files of a folder that trainer and engines share.

    ROOT/v0000000012-UPDATE/        one update
        s0003-000017.message        a message: stream 3, number 17; the name appears when it is complete
        index.json                  appears last: what the update is, and its manifest

Readers may take messages while the folder grows. One with an index is complete, and whoever holds nothing can be
brought up to date from it, unless it has a base.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

import msgspec
import torch

from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.data.weights import Base, Stream
from moe_asyncrl.telemetry.run_folder import sync, write_atomic
from moe_asyncrl.weights.message import host_bytes
from moe_asyncrl.weights.ring import poll

INDEX = "index.json"
_FOLDER = re.compile(r"v(\d{10})-(.+)")


class FolderError(UserError):
    """A file or a folder of messages is not what it must be."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete folder holds."""

    epoch: int
    version: int
    base: Base | None = None
    manifest: str
    streams: tuple[Stream, ...]
    """Their channels are of the machine that wrote them: a reader puts its own path of the folder there."""
    schedules: tuple[tuple[tuple[int, int], ...], ...]


def folder_name(version: int, update: str) -> str:
    """The folder of one update in the root."""
    return f"v{version:010d}-{update}"


def message_name(stream: int, number: int) -> str:
    """The file of one message in its folder."""
    return f"s{stream:04d}-{number:06d}.message"


class FolderWriter:
    """Writes one update. Several processes may write streams of their own into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, stream: int, number: int, message: torch.Tensor) -> None:
        """Write one message (uint8 [bytes], sealed) and sync it. Raises FolderError."""
        path = self.folder / message_name(stream, number)
        temporary = self.folder / f".{path.name}.{secrets.token_hex(6)}"
        try:
            with temporary.open("xb", buffering=0) as file:
                view = host_bytes(message)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as e:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise FolderError(f"a message of weights cannot be written to {path}: {e.strerror}") from e

    def complete(self, index: Index) -> None:
        """Every message is there. Raises FolderError."""
        try:
            sync(self.folder)
            write_atomic(self.folder / INDEX, msgspec.json.encode(index))
        except OSError as e:
            raise FolderError(f"{self.folder / INDEX} cannot be written: {e.strerror}") from e


def read_message(folder: Path, stream: int, number: int, into: torch.Tensor, *, wait_s: float) -> None:
    """Read one message into `into` (uint8, contiguous, of its announced size), once it is there.

    Raises DeadlineExceeded, or FolderError if it has another size or cannot be read.
    """
    path = folder / message_name(stream, number)
    if not poll(path.exists, wait_s):
        raise DeadlineExceeded(f"waited {wait_s:g} s for {path}")
    view = host_bytes(into)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != len(view):
                raise FolderError(f"{path} has {size} bytes, {len(view)} were announced")
            while view:
                count = file.readinto(view)
                if not count:
                    raise FolderError(f"{path} ends early")
                view = view[count:]
    except OSError as e:
        raise FolderError(f"{path} cannot be read: {e.strerror}") from e


def read_index(folder: Path) -> Index:
    """Raises FolderError if the folder is not complete or not readable."""
    try:
        return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    except FileNotFoundError:
        raise FolderError(f"the update in {folder} is not complete: it has no {INDEX}") from None
    except (OSError, msgspec.MsgspecError) as e:
        raise FolderError(f"{folder / INDEX} cannot be read: {e}") from e


def _updates(root: Path) -> list[tuple[int, Path]]:
    """Versions and folders of updates, the newest version first."""
    if not root.is_dir():
        return []
    return sorted(((int(m[1]), p) for p in root.iterdir() if (m := _FOLDER.fullmatch(p.name))), reverse=True)


def newest(root: Path, version: int | None = None) -> Path | None:
    """The newest complete folder with whole weights (of `version`, where given)."""
    for _, folder in _updates(root):
        with contextlib.suppress(FolderError):
            index = read_index(folder)
            if index.base is None and version in (None, index.version):
                return folder
    return None


def prune(root: Path, keep: Path) -> None:
    """Delete the folders of versions up to that of `keep`, a complete folder with whole weights, but `keep` itself."""
    kept = read_index(keep).version
    for version, folder in _updates(root):
        if folder != keep and version <= kept:
            # Its index first: a reader must not take a folder that is going.
            (folder / INDEX).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
