"""Small protocols by which a lower layer uses a higher one without importing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a bucket, as the engine will see it."""

    name: str
    """HF checkpoint name."""
    dtype: str
    """Torch name without the prefix, for example `bfloat16`."""
    shape: tuple[int, ...]


class EngineControl(Protocol):
    """What a weight update needs of one engine. Every call raises `UserError`'s kin with the engine's name on failure.

    Calls that take part in a collective (`join_group`, `receive_bucket`) return when the engine has finished its part.
    """

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def world_size(self) -> int:
        """Engine ranks that join the update group."""
        ...

    async def join_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, deadline_s: float
    ) -> None:
        """Join the process group `group` whose rank 0 is the trainer."""
        ...

    async def leave_group(self, *, group: str, deadline_s: float) -> None:
        """Destroy the process group on the engine's side."""
        ...

    async def pause(self, *, mode: str, deadline_s: float) -> None:
        """Stop generating; `mode` is SGLang's `in_place`, `retract` or `abort`."""
        ...

    async def resume(self, *, deadline_s: float) -> None:
        """Go on generating."""
        ...

    async def begin_update(self, *, deadline_s: float) -> None:
        """Open an update session."""
        ...

    async def receive_bucket(
        self, tensors: Sequence[TensorMeta], *, group: str, version: int | None, deadline_s: float
    ) -> None:
        """Receive one broadcast of the tensors back to back as bytes, and load them.

        `version` is set on the last one.
        """
        ...

    async def end_update(self, *, deadline_s: float) -> None:
        """Close the session: finalise the weights once."""
        ...

    async def serving_version(self, *, deadline_s: float) -> int:
        """The version that the engine itself reports; -1 if it never got one."""
        ...
