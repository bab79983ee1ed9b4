"""The sender's copy of what it last sent, piece by piece, against which deltas are made.

Memory: the bytes of the rank's pieces once more, in host memory, in the dtype they travel as (`Snapshot.nbytes`); the
work of a delta needs a few megabytes on top of the blobs.

When the copy is worth something: engines hold version v only once all of them have committed it. So the copy has a
base, (version, manifest), from `commit` until the next `begin`, and none in between: then it holds, piece by piece,
what the update under way sends. An update that is given up leaves no base, and the next one has to be full.

    begin(v)  →  compare(key, new) or store(key, new) for each piece  →  commit(v, manifest)

After `take` the copy is `new`, so a piece may be sent whole after all without `store`. A version that is sent once
more, in full, goes on where it was: `store` what had no turn, no second `begin`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from moe_asyncrl.data.weights import Base
from moe_asyncrl.weights.sparse_encode import Encoding

Key = TypeVar("Key", bound=Hashable)


class Snapshot(Generic[Key]):
    """See the module. Calls for different pieces may run on several threads at once."""

    def __init__(self) -> None:
        self._copies: dict[Key, torch.Tensor] = {}
        self._base: Base | None = None
        self._pending: int | None = None
        self._against: Base | None = None
        self._done: set[Key] = set()

    @property
    def base(self) -> Base | None:
        """What a delta may be made against; None: the next update has to be full."""
        return self._base

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the copies take."""
        return sum(copy.nbytes for copy in self._copies.values())

    def begin(self, version: int) -> Base | None:
        """An update to `version` is being made. Returns the base for `compare`; from now on the copy has none."""
        self._pending, self._against, self._base = version, self._base, None
        self._done = set()
        return self._against

    def compare(self, key: Key, new: torch.Tensor) -> Encoding:
        """What changed in a piece since the base; the copy becomes `new` on the way, also where it is too much to send.

        That is once `take` of what is returned was called; without it, another `begin` has to follow.

        Args:
            new: the piece, contiguous, row by row, in the dtype it travels as. From a GPU it is copied here first.

        Raises:
            ValueError: no update has begun, it has no base, the piece is unknown, comes twice, or has another size.
        """
        self._begun()
        if key in self._done:
            raise ValueError(f"{key} comes twice in the update to version {self._pending}")
        if self._against is None or key not in self._copies:
            raise ValueError(f"there is no copy of {key} that the engines hold: it has to be sent whole")
        self._done.add(key)
        return Encoding(self._copies[key], new.cpu(), update=True)

    def store(self, key: Key, new: torch.Tensor) -> None:
        """Keep a piece that is sent whole: as in `compare`. Raises ValueError: no update has begun."""
        self._begun()
        copy = self._copies.get(key)
        if copy is None or copy.dtype != new.dtype or copy.numel() != new.numel():
            copy = self._copies[key] = torch.empty(new.numel(), dtype=new.dtype)
        copy.copy_(new.detach().reshape(-1))
        self._done.add(key)

    def commit(self, version: int, manifest: str) -> None:
        """All engines have committed `version`: the copy is a base again.

        Raises:
            ValueError: another version was begun, or a piece of the copy has had no turn, so that it is older.
        """
        if self._pending != version:
            raise ValueError(
                f"version {version} cannot be committed: the copy holds what version {self._pending} sends"
            )
        missing = self._copies.keys() - self._done
        if missing:
            one = next(iter(missing))
            raise ValueError(f"version {version} cannot be committed: {len(missing)} pieces had no turn, as {one}")
        self._pending, self._against, self._base = None, None, Base(version=version, manifest=manifest)

    def forget(self) -> None:
        """Drop the copies: after the plan has changed, or to free the memory."""
        self._copies.clear()
        self._done.clear()
        self._base = self._pending = self._against = None

    def _begun(self) -> None:
        if self._pending is None:
            raise ValueError("no update has begun")
