"""Small protocols by which a lower layer uses a higher one without importing it."""

from __future__ import annotations

from typing import Protocol

from moe_asyncrl.data.weights import CopyOffer, Hold, Memory, Prepare, Progress


class EngineControl(Protocol):
    """What a weight update needs of one engine. Every call raises `UserError`'s kin with the engine's name on failure.

    Calls that take part in a collective (`join_group`, `receive`) return when the engine has finished its part.
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

    # --- two-phase updates, by the plugin's route ---------------------------------------------------------------

    async def hold(self, *, deadline_s: float) -> Hold:
        """What the engine holds; answered in every state."""
        ...

    async def prepare(self, order: Prepare, *, deadline_s: float) -> None:
        """Announce an update. It is refused, with the reason: an epoch older than one that was seen (StaleEpoch), a
        base that is not held, a version that does not rise, slices or deltas that it cannot place. The engine still
        serves."""
        ...

    async def receive(self, update: str, count: int, *, deadline_s: float) -> Progress:
        """Receive, check and apply the next `count` messages of the schedule (fewer at its end). Needs a paused
        engine. A failure leaves it broken."""
        ...

    async def finish(self, update: str, *, deadline_s: float) -> str:
        """Finalise the weights once everything came. Returns the manifest of what was received."""
        ...

    async def commit(self, update: str, *, version: int, manifest: str, held_as: str = "", deadline_s: float) -> None:
        """Take the received weights as `version`; `manifest` is the sender's own. Only now may it resume. `held_as`: of
        a copy, the manifest of the weights that were copied."""
        ...

    async def abandon(self, update: str, *, reason: str, deadline_s: float) -> Hold:
        """End the update: before its first byte the engine serves as before, later it is broken. Idempotent."""
        ...

    async def sleep(self, *, epoch: int, deadline_s: float) -> Hold:
        """Give all device memory back, with the weights in it. It has to be paused, and no request may hold any."""
        ...

    async def wake(self, memory: Memory, *, epoch: int, deadline_s: float) -> Hold:
        """Get memory back: of weights before an update, of the cache after its commit."""
        ...

    async def offer_copy(self, copy: str, *, group: str, bucket_bytes: int, deadline_s: float) -> CopyOffer:
        """Get ready to send what it serves, rank to rank, to the engine of the same layout in the process group
        `group`."""
        ...

    async def send_copy(self, copy: str, count: int, *, deadline_s: float) -> str:
        """Send the next `count` messages of the offer. Returns the manifest of those sent so far."""
        ...
