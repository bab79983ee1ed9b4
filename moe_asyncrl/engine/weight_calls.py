"""The calls of a two-phase weight update, which our plugin answers. A part of `EngineClient`."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from moe_asyncrl.data.errors import StaleEpoch
from moe_asyncrl.data.weights import ROUTE, CopyOffer, Hold, Memory, Prepare, Progress
from moe_asyncrl.engine.errors import EngineRefused, MalformedReply

T = TypeVar("T")


class _Reply(msgspec.Struct, kw_only=True):
    ok: bool
    kind: str = ""
    message: str = ""
    result: msgspec.Raw = msgspec.Raw(b"null")


class WeightCalls:
    """See `moe_asyncrl.data.protocols.EngineControl`."""

    _name: str

    async def _call(self, method: str, path: str, body: bytes | None, deadline_s: float, what: str) -> bytes:
        raise NotImplementedError

    async def hold(self, *, deadline_s: float) -> Hold:
        """What the engine holds; answered in every state."""
        return await self._do("hold", {}, Hold, deadline_s, "what it holds")

    async def prepare(self, order: Prepare, *, deadline_s: float) -> None:
        """Announce an update. Raises StaleEpoch, or EngineRefused with the reason."""
        what = f"preparation of version {order.version}"
        await self._do("prepare", {"order": order}, type(None), deadline_s, what)

    async def receive(self, update: str, count: int, *, deadline_s: float) -> Progress:
        """Receive, check and apply the next `count` messages. Raises EngineRefused: the engine is then broken."""
        body = {"update": update, "count": count}
        return await self._do("receive", body, Progress, deadline_s, f"{count} messages of weights")

    async def finish(self, update: str, *, deadline_s: float) -> str:
        """Finalise what was received. Returns its manifest."""
        return await self._do("finish", {"update": update}, str, deadline_s, "end of the weights")

    async def commit(self, update: str, *, version: int, manifest: str, held_as: str = "", deadline_s: float) -> None:
        """Serve the received weights as `version`. Raises EngineRefused if they are not those of `manifest`.

        `held_as`: of a copy, the manifest of the weights that were copied.
        """
        body = {"update": update, "version": version, "manifest": manifest, "held_as": held_as}
        await self._do("commit", body, type(None), deadline_s, f"commit of version {version}")

    async def abandon(self, update: str, *, reason: str, deadline_s: float) -> Hold:
        """End the update. Returns what the engine holds then."""
        body = {"update": update, "reason": reason}
        return await self._do("abandon", body, Hold, deadline_s, "end of a failed update")

    async def offer_copy(self, copy: str, *, group: str, bucket_bytes: int, deadline_s: float) -> CopyOffer:
        """Get ready to send its weights to the engine of the same layout in `group`."""
        body = {"copy": copy, "group": group, "bucket_bytes": bucket_bytes}
        return await self._do("offer_copy", body, CopyOffer, deadline_s, "offer of a copy of its weights")

    async def send_copy(self, copy: str, count: int, *, deadline_s: float) -> str:
        """Send the next `count` messages of the offer. Returns the manifest of those sent so far."""
        return await self._do("send_copy", {"copy": copy, "count": count}, str, deadline_s, "copy of its weights")

    async def sleep(self, *, epoch: int, deadline_s: float) -> Hold:
        """Give all device memory back. Raises EngineRefused unless it is paused and no request holds keys and values.

        Requests that come meanwhile wait. Its weights are gone: only an update with all weights wakes it whole.
        """
        return await self._do("sleep", {"epoch": epoch}, Hold, deadline_s, "order to sleep")

    async def wake(self, memory: Memory, *, epoch: int, deadline_s: float) -> Hold:
        """Get memory back: of weights before an update, of the cache after its commit."""
        body = {"epoch": epoch, "memory": memory}
        return await self._do("wake", body, Hold, deadline_s, f"order to take back its memory of {memory}")

    async def _do(self, do: str, body: dict[str, Any], kind: type[T], deadline_s: float, what: str) -> T:
        content = await self._call("POST", ROUTE, msgspec.json.encode({"do": do, **body}), deadline_s, what)
        try:
            reply = msgspec.json.decode(content, type=_Reply)
            if reply.ok:
                return msgspec.json.decode(reply.result, type=kind)
        except msgspec.MsgspecError as e:
            raise MalformedReply(f"{self._name}: the reply to {ROUTE} ({do}) is not what was asked for: {e}") from None
        if reply.kind == "stale_epoch":
            raise StaleEpoch(f"{self._name}: {what} refused: {reply.message}")
        raise EngineRefused(f"{self._name}: {what} refused: {reply.message}")
