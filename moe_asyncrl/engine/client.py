"""The asynchronous client of one engine: generation as lists, and the calls of a weight update.

It implements `moe_asyncrl.data.protocols.EngineControl`. Every call has a deadline, and its error names what it waited
for.
"""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from moe_asyncrl.data.messages import Member
from moe_asyncrl.engine.completion import Completion, GenerateRequest, RoutingShape, parse_replies, request_body
from moe_asyncrl.engine.errors import EngineRefused, EngineTimeout, EngineUnreachable, EngineUnwell, MalformedReply
from moe_asyncrl.engine.weight_calls import WeightCalls
from moe_asyncrl.models.spec import ModelSpec

T = TypeVar("T")


class ModelInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    model_path: str
    weight_version: str
    model_type: str | None = None


class _Answer(msgspec.Struct):
    success: bool = True
    message: str = ""


class _Checksums(msgspec.Struct):
    per_engine_checksum: str


def _reason(body: bytes) -> str:
    """The engine's own words in an error reply, on one line."""
    try:
        found = msgspec.json.decode(body)
        inner = found.get("error", found) if isinstance(found, dict) else found
        text = inner.get("message", inner) if isinstance(inner, dict) else inner
    except msgspec.MsgspecError:
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:500]


class EngineClient(WeightCalls):
    """HTTP to one engine. Use it inside one event loop, and `close` it there (or use `async with`)."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "engine-0",
        world_size: int = 1,
        routing: RoutingShape | None = None,
        api_key: str | None = None,
    ) -> None:
        """`world_size`: the engine's ranks in an update group. `routing`: ask for routed experts, of this shape."""
        self._url = url.rstrip("/")
        self._name = name
        self._world_size = world_size
        self._routing = routing
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, member: Member, spec: ModelSpec, api_key: str) -> EngineClient:
        """A client of one life of a run's engine, which serves `spec`."""
        return cls(
            member.url,
            name=member.name,
            world_size=member.world_size,
            routing=RoutingShape.of(spec),
            api_key=api_key,
        )

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def url(self) -> str:
        return self._url

    @property
    def world_size(self) -> int:
        """Engine ranks that join the update group."""
        return self._world_size

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The engine aborts requests whose connection is gone."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[GenerateRequest], *, deadline_s: float, mask: bool = False
    ) -> list[Completion]:
        """Sample one completion per request, sent as one list; completions come in the order of the requests.

        `mask`: also return the sampling masks (every request then needs a finite top_k).
        Raises EngineTimeout, EngineUnreachable, EngineUnwell, EngineRefused, MalformedReply.
        """
        if not requests:
            return []
        submitted = time.time()
        body = request_body(requests, experts=self._routing is not None, mask=mask)
        what = f"{len(requests)} completions ({requests[0].rid}…)"
        reply = await self._call("POST", "/generate", body, deadline_s, what)
        return parse_replies(
            reply,
            requests,
            engine=self._name,
            routing=self._routing,
            mask=mask,
            submitted=submitted,
            finished=time.time(),
        )

    async def abort(self, rid: str | None, *, deadline_s: float) -> None:
        """End a running request early (None: all). Its caller gets what was sampled, with finish reason `abort`."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post("/abort_request", body, deadline_s, f"abort of {rid or 'all requests'}")

    # --- state --------------------------------------------------------------------------------------------------

    async def model_info(self, *, deadline_s: float) -> ModelInfo:
        """Answered by the HTTP process alone: it says nothing about the scheduler."""
        body = await self._call("GET", "/model_info", None, deadline_s, "model_info")
        return self._decode(body, ModelInfo, "/model_info")

    async def serving_version(self, *, deadline_s: float) -> int:
        """The version that the engine itself reports; -1 if it never got one."""
        label = (await self.model_info(deadline_s=deadline_s)).weight_version
        try:
            return int(label)
        except ValueError:
            raise MalformedReply(f"{self._name}: weight version {label!r} is not a number") from None

    async def check_scheduler(self, *, deadline_s: float) -> None:
        """Returns when the scheduler answered, also while generation is paused. Raises EngineTimeout if it hangs."""
        await self._call("GET", "/server_info", None, deadline_s, "a sign of life from its scheduler")

    async def checksum(self, *, deadline_s: float) -> str:
        """Of the weights that it serves, over all its ranks: equal layouts with equal weights give equal sums."""
        body = await self._post("/weights_checker", {"action": "checksum"}, deadline_s, "weights checksum")
        return self._decode(body, _Checksums, "/weights_checker").per_engine_checksum

    async def flush_cache(self, *, deadline_s: float) -> None:
        """Forget all prefixes. Raises EngineRefused while requests run or generation is paused."""
        await self._call("POST", "/flush_cache", b"{}", deadline_s, "flush of the prefix cache")

    # --- weight updates (EngineControl) -------------------------------------------------------------------------

    async def join_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, deadline_s: float
    ) -> None:
        """Join the process group `group` whose rank 0 is the trainer. Returns when the whole group is there."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._post(
            "/init_weights_update_group", body, deadline_s, f"joining update group {group} at {address}:{port}"
        )

    async def leave_group(self, *, group: str, deadline_s: float) -> None:
        """Destroy the process group on the engine's side."""
        await self._post(
            "/destroy_weights_update_group", {"group_name": group}, deadline_s, f"leaving update group {group}"
        )

    async def pause(self, *, mode: str, deadline_s: float) -> None:
        """Stop generating; `mode` is SGLang's `in_place`, `retract` or `abort`."""
        await self._post("/pause_generation", {"mode": mode}, deadline_s, f"pause ({mode})")

    async def resume(self, *, deadline_s: float) -> None:
        """Go on generating."""
        await self._post("/continue_generation", {}, deadline_s, "resume")

    async def set_version(self, version: int, *, deadline_s: float) -> None:
        """Name the weights that are loaded. Running requests go on."""
        # The call's own default aborts every running request.
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", body, deadline_s, f"naming of version {version}")

    async def load_weights(self, model: str, version: int, *, flush: bool, deadline_s: float) -> None:
        """Load all weights from an HF directory on the engine's machine.

        `flush`: also forget prefixes (engine must be idle).
        """
        body = {"model_path": model, "weight_version": str(version), "flush_cache": flush}
        await self._post("/update_weights_from_disk", body, deadline_s, f"loading of {model}")

    # --- HTTP ---------------------------------------------------------------------------------------------------

    def _decode(self, body: bytes, kind: type[T], path: str) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as e:
            raise MalformedReply(f"{self._name}: the reply to {path} is not what was asked for: {e}") from None

    async def _post(self, path: str, body: dict[str, Any], deadline_s: float, what: str) -> bytes:
        reply = await self._call("POST", path, msgspec.json.encode(body), deadline_s, what)
        if reply:
            answer = self._decode(reply, _Answer, path)
            if not answer.success:
                raise EngineRefused(f"{self._name}: {what} failed: {answer.message}")
        return reply

    async def _call(self, method: str, path: str, body: bytes | None, deadline_s: float, what: str) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # No limit: the pool decides how much runs at once, and one here would be a second, hidden queue.
                # No reuse: the server closes idle connections, and a request that meets the closing looks like a
                # dead engine.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=1 << 20,
            )
        try:
            async with asyncio.timeout(deadline_s):
                async with self._session.request(method, self._url + path, data=body) as response:
                    content = await response.read()
                    status = response.status
        except TimeoutError:
            raise EngineTimeout(f"{self._name}: waited {deadline_s:g} s for {what} at {self._url}") from None
        except (aiohttp.ClientError, OSError) as e:
            raise EngineUnreachable(
                f"{self._name}: {self._url} cannot be reached for {what}: {e or type(e).__name__}"
            ) from None
        if status == http.HTTPStatus.SERVICE_UNAVAILABLE and path == "/generate":
            raise EngineUnwell(f"{self._name}: cannot serve {what}: {_reason(content)}")
        if status != 200:
            raise EngineRefused(f"{self._name}: {what} refused (HTTP {status}): {_reason(content)}")
        return content
