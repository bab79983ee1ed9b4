"""The trainer's side of the buffer: one blocking client for each rank. Not for use from several threads."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from moe_asyncrl.buffer.codec import decode_reply, encode, expect
from moe_asyncrl.buffer.endpoint import LOOK_S, Endpoint, Find, connect, finder, wait_for_endpoint
from moe_asyncrl.buffer.patience import Patience
from moe_asyncrl.buffer.requests import Requests
from moe_asyncrl.buffer.security import KeyPair, client_keys
from moe_asyncrl.data.digest import Experts
from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.data.messages import (
    AnyReply,
    AnyRequest,
    Batch,
    ConsumedResult,
    Counters,
    Cursor,
    Done,
    Frames,
    Lease,
    MemberId,
    NotReady,
    Phase,
    RowCut,
    RunState,
)
from moe_asyncrl.data.row_slices import (
    Needs,
    Rows,
    RowSlice,
    blocks_of_layers,
    cut_array,
    cut_bytes,
    cuts_of,
    digest_columns,
    slice_of,
    stored_rows,
)
from moe_asyncrl.data.wire import Frame, TrajectoryHeader, array_from, check_root, routing_spec
from moe_asyncrl.telemetry.run_folder import RunFolder

POLL_S = 0.05
"""Between two looks for a batch, in seconds."""
FETCH_BYTES = 64 << 20
"""Frames are asked for in requests of about this many bytes, so that each has a deadline of its own."""


class BufferClient:
    """Asks and waits. Calls raise `DeadlineExceeded`, `StaleEpoch` (another trainer owns the run) or `RequestRefused`.

    A request without an answer is sent again, over a new connection, until its deadline; the buffer answers a request
    that comes twice as it did the first time.
    """

    def __init__(
        self,
        find: Find,
        keys: KeyPair | None,
        *,
        sender: str,
        epoch: int = 0,
        deadline_s: float = 60.0,
        resend_s: float = 5.0,
    ) -> None:
        """`deadline_s`: longest wait for any answer. `resend_s`: silence after which a request is sent again."""
        self._find = find
        self._keys = keys
        self._requests = Requests(sender, epoch)
        self._holder = f"{sender}/{uuid.uuid4().hex[:12]}"
        self._deadline_s = deadline_s
        self._resend_s = resend_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint: Endpoint | None = None
        self._address = "nowhere"

    @classmethod
    def connect(
        cls, folder: RunFolder, *, sender: str, epoch: int = 0, deadline_s: float = 60.0, start_s: float = 60.0
    ) -> BufferClient:
        """The buffer of a run, once it listens (at most `start_s` seconds from now)."""
        find = finder(folder)
        guarded = wait_for_endpoint(find, start_s, sender).public_key is not None
        keys = client_keys(folder.keys) if guarded else None
        return cls(find, keys, sender=sender, epoch=epoch, deadline_s=deadline_s)

    @property
    def epoch(self) -> int:
        """The lease that requests are sent under: set by `acquire_lease`, or given; 0 without one."""
        return self._requests.epoch

    # --- the run -------------------------------------------------------------------------------------------------

    def state(self) -> RunState:
        """The state of the run now."""
        return expect(self._ask(self._requests.state()), RunState)

    def acquire_lease(self) -> int:
        """Own the run from now on; the epoch. Asking again keeps the lease."""
        lease = expect(self._ask(self._requests.acquire(self._holder)), Lease).lease
        self._requests.epoch = lease
        return lease

    def begin(self, step: int, cursor: Cursor, counters: Counters) -> None:
        """Say where the run stands: `step` steps done. Credits are issued after it and the first commit."""
        expect(self._ask(self._requests.begin(step, cursor, counters)), Done)

    def commit(self, version: int, members: Sequence[MemberId], lost: Sequence[MemberId]) -> None:
        """Weights `version` are on `members`; `lost` must serve nothing more."""
        expect(self._ask(self._requests.commit(version, members, lost)), Done)

    def set_phase(self, phase: Phase, error: str | None = None) -> None:
        """Move the run on, or end it."""
        expect(self._ask(self._requests.set_phase(phase, error, self.epoch)), Done)

    # --- batches -------------------------------------------------------------------------------------------------

    def try_take(self, step: int, version: int, groups: int) -> Batch | NotReady:
        """The batch of `step` (steps done + 1), which starts from weights `version`, if it is there."""
        reply = self._ask(self._requests.take(step, version, groups))
        return reply if isinstance(reply, NotReady) else expect(reply, Batch)

    def take(
        self,
        step: int,
        version: int,
        groups: int,
        *,
        deadline_s: float,
        since: float | None = None,
        turn_s: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> Batch | None:
        """The batch of `step`, once it is there.

        Returns None after `turn_s` seconds, or when `stop` says so: a caller that asks again gives the monotonic time
        of its first call as `since`, from which `deadline_s` counts.

        Raises `DeadlineExceeded` if the batch is not there in time, `UserError` if the run failed elsewhere.
        """
        began = time.monotonic()
        end = (began if since is None else since) + deadline_s
        while True:
            answer = self.try_take(step, version, groups)
            if isinstance(answer, Batch):
                return answer
            s = answer.state
            if s.phase == "failed":
                raise UserError(f"the run failed: {s.error}")
            now = time.monotonic()
            if now > end:
                serving = sum(m.state == "serving" for m in s.members)
                raise DeadlineExceeded(
                    f"{self._requests.sender} waited {deadline_s:g} s for {groups} groups for step {step}: "
                    f"{answer.held} are held, {s.issued} are being sampled, {serving} of {len(s.members)} engines "
                    f"serve version {s.version}; look at the rollout's log, or raise buffer.wait_s"
                )
            if now > began + turn_s or stop():
                return None
            time.sleep(POLL_S)

    def fetch(
        self, step: int, headers: Sequence[TrajectoryHeader], fields: Sequence[str] | None = None
    ) -> dict[str, dict[str, np.ndarray]]:
        """Arrays (read-only) by trajectory and field, of trajectories in the batch of `step`.

        `fields`: wire fields, all if not given; one that a trajectory lacks is left out.
        """
        found: dict[str, dict[str, np.ndarray]] = {h.identity.trajectory: {} for h in headers}
        specs = {(h.identity.trajectory, spec.field): spec for h in headers for spec in h.frames}
        asked = sorted({s.field for s in specs.values()}) if fields is None else list(fields)
        for chunk in _chunks(headers, set(asked)):
            reply, frames = self._exchange(self._requests.fetch(step, chunk, asked), ())
            index = expect(reply, Frames).index
            if len(index) != len(frames):
                raise UserError(f"the buffer announced {len(index)} frames and sent {len(frames)}")
            for (trajectory, field), frame in zip(index, frames, strict=True):
                found[trajectory][field] = array_from(specs[trajectory, field], frame, trajectory=trajectory)
        return found

    def fetch_rows(
        self,
        step: int,
        headers: Sequence[TrajectoryHeader],
        needs: Needs,
        layers: Sequence[int],
        tokens: Mapping[str, npt.NDArray[np.int32]],
    ) -> dict[str, RowSlice]:
        """A rank's own part of the routing rows, by trajectory: the rows `needs`, of the MoE layers `layers`.

        Args:
            step: of the taken batch.
            headers: of the groups of all trajectories in `needs`, since rows may stand in another one's frame.
            needs: rows by trajectory; those without rows on the wire are left out of the answer.
            layers: numbers of the rank's MoE layers among those of the model, rising.
            tokens: int32 [T] by trajectory, whole.

        Raises:
            ContractViolation: rows, digests and tokens do not belong together; names trajectory, row and layers.
        """
        by_name = {h.identity.trajectory: h for h in headers}
        routed = {name: rows for name, rows in needs.items() if routing_spec(by_name[name]) is not None and layers}
        found: dict[str, RowSlice] = {}
        for blocks, names in _by_blocks(by_name, routed, layers).items():
            stored = stored_rows(by_name, {name: routed[name] for name in names})
            arrays: dict[str, Experts] = {}
            columns: dict[str, npt.NDArray[np.uint32]] = {}
            for cuts, digests in _row_requests(by_name, stored, names, blocks):
                reply, frames = self._exchange(self._requests.fetch_rows(step, blocks, cuts, digests), ())
                index = expect(reply, Frames).index
                if len(index) != len(frames) or [n for n, _ in index] != [*(c.trajectory for c in cuts), *digests]:
                    raise UserError(f"the buffer was asked for {len(cuts)} cuts and sent {len(frames)} other frames")
                for cut, frame in zip(cuts, frames, strict=False):
                    name = cut.trajectory
                    arrays[name] = cut_array(by_name[name], frame, len(stored[name]), blocks)
                for name, frame in zip(digests, frames[len(cuts) :], strict=True):
                    columns[name] = digest_columns(by_name[name], frame, blocks)
            for name in names:
                check_root(by_name[name], tokens[name])
                found[name] = slice_of(
                    by_name[name],
                    routed[name],
                    layers,
                    blocks,
                    stored=stored,
                    arrays=arrays,
                    tokens=tokens[name],
                    columns=columns[name],
                )
        return found

    def consumed(self, step: int) -> ConsumedResult:
        """The batch of `step` is in the weights: its groups are freed. What a checkpoint taken now must hold."""
        return expect(self._ask(self._requests.consumed(step)), ConsumedResult)

    # --- the socket ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._context.term()

    def __enter__(self) -> BufferClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: AnyRequest) -> AnyReply:
        return self._exchange(request, ())[0]

    def _exchange(self, request: AnyRequest, frames: Sequence[Frame]) -> tuple[AnyReply, list[Frame]]:
        parts = [encode(request), *frames]
        patience = Patience(self._deadline_s, self._resend_s)
        while True:
            if self._socket is None:
                self._open()
            if self._socket is not None:
                self._socket.send_multipart(parts, copy=False)
            wait = patience.next_wait()
            if wait is None:
                raise patience.exceeded(request, self._address)
            answer = self._receive(request.request, wait)
            if answer is not None:
                return answer
            self._drop()

    def _receive(self, number: int, wait_s: float) -> tuple[AnyReply, list[Frame]] | None:
        """The answer, or None after `wait_s` seconds or as soon as the buffer is found to listen elsewhere."""
        end = time.monotonic() + wait_s
        while (left := end - time.monotonic()) > 0:
            look = min(left, LOOK_S)
            if self._socket is None:
                time.sleep(look)
            elif self._socket.poll(max(1, int(look * 1000))):
                first, *rest = self._socket.recv_multipart(copy=False)
                reply = decode_reply(first.buffer)
                if reply.request == number:
                    return reply, [f.buffer for f in rest]
                continue
            if self._find() not in (None, self._endpoint):
                return None
        return None

    def _open(self) -> None:
        endpoint = self._find()
        if endpoint is not None:
            self._endpoint = endpoint
            self._address = endpoint.address
            self._socket = connect(self._context.socket(zmq.DEALER), endpoint, self._keys)

    def _drop(self) -> None:
        """Forget the connection with what still waits in it; the next one may find a buffer at another address."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _by_blocks(
    headers: Mapping[str, TrajectoryHeader], needs: Needs, layers: Sequence[int]
) -> dict[tuple[int, ...], list[str]]:
    """Trajectories by the blocks that have the layers: in one run all are cut alike."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in needs:
        found.setdefault(blocks_of_layers(headers[name], layers), []).append(name)
    return found


def _row_requests(
    headers: Mapping[str, TrajectoryHeader], stored: Mapping[str, Rows], names: Sequence[str], blocks: Sequence[int]
) -> Iterator[tuple[list[RowCut], list[str]]]:
    """Cuts of about `FETCH_BYTES` each; the digests come with the last ones."""
    cuts: list[RowCut] = []
    size = 0
    for cut in cuts_of(stored):
        cuts.append(cut)
        size += cut_bytes(headers[cut.trajectory], len(stored[cut.trajectory]), blocks)
        if size >= FETCH_BYTES:
            yield cuts, []
            cuts, size = [], 0
    yield cuts, list(names)


def _chunks(headers: Sequence[TrajectoryHeader], fields: set[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for h in headers:
        chunk.append(h.identity.trajectory)
        size += sum(spec.nbytes for spec in h.frames if spec.field in fields)
        if size >= FETCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
