"""Trajectory <-> header and frames. The header says everything but the arrays; each array is one frame.

A reader can therefore plan from headers alone and ask only for the frames it needs. Nothing here executes
what it reads: headers are typed msgpack, frames are raw little-endian arrays whose size is checked first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.digest import RoutingBlock, block_digest, mask_digest, root_digest, row_digests
from moe_asyncrl.data.provenance import other_version
from moe_asyncrl.data.trajectory import (
    SCHEMA,
    Identity,
    PolicyAsked,
    RoutingRun,
    SamplingMask,
    ScorerReport,
    Segment,
    StepRewards,
    TeacherTopK,
    Trajectory,
)
from moe_asyncrl.data.validate import ContractViolation, covers

Frame = bytes | memoryview
Blocks = Sequence[tuple[int, int]]
"""MoE layers [start, end) that are checked together, in order, all of them."""

MOST = 1 << 40
"""Elements that the shape of a frame may speak of, an empty side counted as one: what NumPy can always make."""
ROUTING = "routing.experts"
"""The field of the routing rows."""
FIELDS: dict[str, tuple[str, ...]] = {
    "tokens": ("<i4",),
    "loss_mask": ("|b1",),
    "logprobs": ("<f4",),
    "weight_version": ("<i4",),
    "support_logprobs": ("<f4",),
    ROUTING: ("|u1", "<u2"),
    "sampling_mask.indptr": ("<i8",),
    "sampling_mask.ids": ("<i4",),
    "step_rewards.positions": ("<i4",),
    "step_rewards.values": ("<f4",),
    "teacher_logprobs": ("<f4",),
    "teacher_topk.ids": ("<i4",),
    "teacher_topk.values": ("<f4",),
}
"""Every array field and the element types that it may have on the wire."""

PAIRS = (
    ("sampling_mask.indptr", "sampling_mask.ids"),
    ("step_rewards.positions", "step_rewards.values"),
    ("teacher_topk.ids", "teacher_topk.values"),
)
"""Fields that say nothing without each other."""


class FrameSpec(msgspec.Struct, frozen=True, array_like=True):
    """One array of a trajectory: its field, element type (numpy string) and shape."""

    field: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the frame."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class SharedRows(msgspec.Struct, frozen=True, array_like=True):
    """The first `rows` routing rows are those of `trajectory`, of the same group, which has all of its own."""

    trajectory: str
    rows: int


class TrajectoryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a trajectory except its arrays."""

    schema: int
    identity: Identity
    policy: PolicyAsked
    segments: tuple[Segment, ...]
    length: int
    """T, tokens"""
    sampled: int
    """Tokens that the policy sampled."""
    oldest_version: int
    newest_version: int
    routing_runs: tuple[RoutingRun, ...]
    other_version_rows: int
    """Rows of other weights than they should be (`data/provenance.py`)."""
    other_version_sampled: int
    """Sampled tokens that are predicted by such rows."""
    routing_blocks: tuple[RoutingBlock, ...]
    """What binds the rows, block by block; empty without rows."""
    shared_rows: SharedRows | None
    """Rows that stand in another trajectory's frame; the own frame then holds those behind them."""
    mask_digest: str
    digest: str
    """Of tokens, rows and mask together (`data/digest.py`)."""
    rewards: dict[str, float]
    score_status: dict[str, ScorerReport]
    teacher_version: str | None
    metadata: dict[str, str]
    frames: tuple[FrameSpec, ...]


def arrays_of(t: Trajectory) -> dict[str, np.ndarray]:
    """The arrays of a trajectory by wire field, in a fixed order; absent ones are left out."""
    found: dict[str, np.ndarray | None] = {
        "tokens": t.tokens,
        "loss_mask": t.loss_mask,
        "logprobs": t.logprobs,
        "weight_version": t.weight_version,
        "support_logprobs": t.support_logprobs,
        ROUTING: t.routing_experts,
        "sampling_mask.indptr": t.sampling_mask.indptr if t.sampling_mask else None,
        "sampling_mask.ids": t.sampling_mask.ids if t.sampling_mask else None,
        "step_rewards.positions": t.step_rewards.positions if t.step_rewards else None,
        "step_rewards.values": t.step_rewards.values if t.step_rewards else None,
        "teacher_logprobs": t.teacher_logprobs,
        "teacher_topk.ids": t.teacher_topk.ids if t.teacher_topk else None,
        "teacher_topk.values": t.teacher_topk.values if t.teacher_topk else None,
    }
    return {name: array for name, array in found.items() if array is not None}


def encode(
    t: Trajectory, *, blocks: Blocks = (), shared: SharedRows | None = None
) -> tuple[TrajectoryHeader, list[Frame]]:
    """Header and frames of a trajectory; frames stand in the order of `header.frames`.

    `blocks`: how the trainer's pipeline stages cut the MoE layers; all layers in one block if not given. `shared`:
    leading rows that another trajectory of the group carries.
    """
    specs: list[FrameSpec] = []
    frames: list[Frame] = []
    for field, array in arrays_of(t).items():
        own = array[shared.rows :] if field == ROUTING and shared is not None else array
        little = np.ascontiguousarray(own, dtype=own.dtype.newbyteorder("<"))
        specs.append(FrameSpec(field, little.dtype.str, tuple(little.shape)))
        frames.append(little.reshape(-1).view(np.uint8).data)
    bound: tuple[RoutingBlock, ...] = ()
    if t.routing_experts is not None:
        columns = digests_of(t.routing_experts, t.tokens, blocks or ((0, t.routing_experts.shape[1]),))
        bound = tuple(RoutingBlock(a, b, block_digest(c)) for (a, b), c in columns.items())
    masked = mask_digest(t.sampling_mask)
    header = TrajectoryHeader(
        schema=SCHEMA,
        identity=t.identity,
        policy=t.policy,
        segments=t.segments,
        length=t.length,
        routing_runs=t.routing_runs,
        **counts_of(t.routing_runs, t.loss_mask, t.weight_version),
        routing_blocks=bound,
        shared_rows=shared,
        mask_digest=masked,
        digest=root_digest(t.tokens, rows=_kind(specs), blocks=bound, mask=masked),
        rewards=t.rewards,
        score_status=t.score_status,
        teacher_version=t.teacher_version,
        metadata=t.metadata,
        frames=tuple(specs),
    )
    return header, frames


def counts_of(
    runs: Sequence[RoutingRun], loss_mask: npt.NDArray[np.bool_], weight_version: npt.NDArray[np.int32]
) -> dict[str, int]:
    """What a header counts of its arrays [T], by field."""
    versions = weight_version[loss_mask]
    other = other_version(runs, loss_mask, weight_version)
    return {
        "sampled": int(loss_mask.sum()),
        "oldest_version": int(versions.min()) if versions.size else -1,
        "newest_version": int(versions.max()) if versions.size else -1,
        "other_version_rows": int(other.sum()),
        "other_version_sampled": int((other & loss_mask[1:]).sum()),
    }


def digests_of(
    experts: np.ndarray, tokens: npt.NDArray[np.int32], blocks: Blocks
) -> dict[tuple[int, int], npt.NDArray[np.uint32]]:
    """Row digests uint32 [T-1] of each block. Raises ValueError unless the blocks are all layers, in order."""
    if [a for a, _ in blocks] + [experts.shape[1]] != [0, *(b for _, b in blocks)]:
        raise ValueError(f"blocks of layers {list(blocks)} are not the {experts.shape[1]} MoE layers in order")
    rows = np.arange(experts.shape[0])
    return {(a, b): row_digests(experts[:, a:b], tokens[:-1], rows, first_layer=a) for a, b in blocks}


def _kind(specs: Sequence[FrameSpec]) -> str:
    """Element type and shape of one row, as text."""
    return "".join(f"{s.dtype}{list(s.shape[1:])}" for s in specs if s.field == ROUTING)


def check_header(h: TrajectoryHeader) -> None:
    """Raise `ContractViolation` if the header is of another schema or names an unknown field or element type."""
    name = h.identity.trajectory
    if h.schema != SCHEMA:
        raise ContractViolation(f"trajectory {name}: schema {h.schema}, this build reads {SCHEMA}")
    seen: set[str] = set()
    for spec in h.frames:
        if spec.field not in FIELDS or spec.dtype not in FIELDS[spec.field] or spec.field in seen:
            raise ContractViolation(f"trajectory {name}: frame {spec.field!r} of type {spec.dtype!r} is not allowed")
        if len(spec.shape) > 3 or any(n < 0 for n in spec.shape) or math.prod(max(1, n) for n in spec.shape) > MOST:
            raise ContractViolation(f"trajectory {name}: frame {spec.field!r} has the shape {spec.shape}")
        seen.add(spec.field)
    missing = {"tokens", "loss_mask", "logprobs", "weight_version"} - seen
    if missing:
        raise ContractViolation(f"trajectory {name}: frames missing: {', '.join(sorted(missing))}")
    _check_routing(h)
    for pair in PAIRS:
        if len(seen.intersection(pair)) == 1:
            raise ContractViolation(f"trajectory {name}: of {' and '.join(pair)} only one frame is there")


def routing_spec(h: TrajectoryHeader) -> FrameSpec | None:
    """The frame of the trajectory's own routing rows; None where nothing was routed."""
    return next((s for s in h.frames if s.field == ROUTING), None)


def _check_routing(h: TrajectoryHeader) -> None:
    name, spec = h.identity.trajectory, routing_spec(h)
    blocks, shared = h.routing_blocks, h.shared_rows
    if spec is None:
        if blocks or shared is not None:
            raise ContractViolation(f"trajectory {name}: its header speaks of routing rows, and has no frame of them")
        return
    chained = len(spec.shape) == 3 and [b.start for b in blocks] + [spec.shape[1]] == [0, *(b.end for b in blocks)]
    if not chained or any(b.end <= b.start for b in blocks):
        raise ContractViolation(
            f"trajectory {name}: blocks {[(b.start, b.end) for b in blocks]} are not the layers of rows {spec.shape}"
        )
    ahead = 0 if shared is None else shared.rows
    if ahead < 0 or ahead + spec.shape[0] != h.length - 1 or (shared is not None and shared.trajectory == name):
        raise ContractViolation(
            f"trajectory {name}: {ahead} shared and {spec.shape[0]} own routing rows for {h.length} tokens"
        )


def array_from(spec: FrameSpec, frame: Frame, *, trajectory: str) -> np.ndarray:
    """The (read-only) array of one frame. Raises `ContractViolation` if its size does not fit the header."""
    if len(frame) != spec.nbytes:
        raise ContractViolation(
            f"trajectory {trajectory}: frame {spec.field!r} has {len(frame)} bytes, its header says {spec.nbytes}"
        )
    return np.frombuffer(frame, dtype=np.dtype(spec.dtype)).reshape(spec.shape)


def decode_arrays(h: TrajectoryHeader, frames: Iterable[Frame]) -> dict[str, np.ndarray]:
    """Arrays by field, from all frames of a trajectory in header order."""
    check_header(h)
    given = list(frames)
    if len(given) != len(h.frames):
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: {len(given)} frames arrived, its header lists {len(h.frames)}"
        )
    return {s.field: array_from(s, f, trajectory=h.identity.trajectory) for s, f in zip(h.frames, given, strict=True)}


def decode(h: TrajectoryHeader, frames: Iterable[Frame]) -> Trajectory:
    """The whole trajectory, if it shares no rows (see `data/group_wire.py`).

    Raises `ContractViolation` where bytes, shapes or digests do not fit.
    """
    return assemble(h, decode_arrays(h, frames))


def check_counts(h: TrajectoryHeader, a: Mapping[str, np.ndarray]) -> None:
    """Raise `ContractViolation` unless what the header says of lengths, tokens and versions is so.

    The trainer plans by headers alone: a wrong count would give all tokens of an update wrong weights.
    """
    name = h.identity.trajectory
    for field in ("tokens", "loss_mask", "logprobs", "weight_version"):
        if h.length < 1 or a[field].shape != (h.length,):
            raise ContractViolation(f"trajectory {name}: {field} {list(a[field].shape)} for {h.length} tokens")
    if ROUTING in a and not covers(h.routing_runs, h.length - 1):
        raise ContractViolation(f"trajectory {name}: routing.runs do not cover rows 0 to {h.length - 1} once, in order")
    for field, count in counts_of(h.routing_runs, a["loss_mask"], a["weight_version"]).items():
        if getattr(h, field) != count:
            raise ContractViolation(
                f"trajectory {name}: its header says {field} {getattr(h, field)}, by its arrays it is {count}"
            )


def check_root(h: TrajectoryHeader, tokens: npt.NDArray[np.int32]) -> None:
    """Raise `ContractViolation` unless the header's blocks of rows and its mask are those of these tokens."""
    if root_digest(tokens, rows=_kind(h.frames), blocks=h.routing_blocks, mask=h.mask_digest) != h.digest:
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: routing or sampling mask do not belong to these tokens (wrong digest)"
        )


def check_mask(h: TrajectoryHeader, a: Mapping[str, np.ndarray]) -> SamplingMask | None:
    """The sampling mask. Raises `ContractViolation` if it is not the one that the header names."""
    mask = SamplingMask(a["sampling_mask.indptr"], a["sampling_mask.ids"]) if "sampling_mask.ids" in a else None
    if mask_digest(mask) != h.mask_digest:
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: its sampling mask does not belong to these tokens (wrong digest)"
        )
    return mask


def check_binding(
    h: TrajectoryHeader, a: Mapping[str, np.ndarray]
) -> tuple[SamplingMask | None, dict[tuple[int, int], npt.NDArray[np.uint32]]]:
    """The sampling mask, and the digests of the rows block by block, from all arrays of a trajectory.

    Raises `ContractViolation` if the mask or one of the rows is not that of these tokens, or a count of the header is
    not that of its arrays.
    """
    check_counts(h, a)
    check_root(h, a["tokens"])
    experts, columns = a.get(ROUTING), {}
    if experts is not None:
        columns = digests_of(experts, a["tokens"], [(b.start, b.end) for b in h.routing_blocks])
        for block, column in zip(h.routing_blocks, columns.values(), strict=True):
            check_block(h, block, column)
    return check_mask(h, a), columns


def check_block(h: TrajectoryHeader, block: RoutingBlock, digests: npt.NDArray[np.uint32]) -> None:
    """Raise `ContractViolation` unless `digests` uint32 [T-1] are those of the rows that the header names."""
    if len(digests) != h.length - 1 or block_digest(digests) != block.digest:
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: its routing rows of MoE layers {block.start} to {block.end - 1} do "
            "not belong to these tokens (wrong digest)"
        )


def assemble(h: TrajectoryHeader, a: Mapping[str, np.ndarray]) -> Trajectory:
    """A trajectory from its header and all of its arrays; the digest is checked."""
    mask, _ = check_binding(h, a)
    return Trajectory(
        identity=h.identity,
        policy=h.policy,
        segments=h.segments,
        tokens=a["tokens"],
        loss_mask=a["loss_mask"],
        logprobs=a["logprobs"],
        weight_version=a["weight_version"],
        support_logprobs=a.get("support_logprobs"),
        routing_experts=a.get(ROUTING),
        routing_runs=h.routing_runs,
        sampling_mask=mask,
        rewards=h.rewards,
        score_status=h.score_status,
        step_rewards=(
            StepRewards(a["step_rewards.positions"], a["step_rewards.values"]) if "step_rewards.values" in a else None
        ),
        teacher_logprobs=a.get("teacher_logprobs"),
        teacher_topk=TeacherTopK(a["teacher_topk.ids"], a["teacher_topk.values"]) if "teacher_topk.ids" in a else None,
        teacher_version=h.teacher_version,
        metadata=h.metadata,
    )
