"""Trajectory <-> header and frames. The header says everything but the arrays; each array is one frame.

A reader can therefore plan from headers alone and ask only for the frames it needs. Nothing here executes
what it reads: headers are typed msgpack, frames are raw little-endian arrays whose size is checked first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from moe_asyncrl.data.digest import binding_digest
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
from moe_asyncrl.data.validate import ContractViolation

Frame = bytes | memoryview

FIELDS: dict[str, tuple[str, ...]] = {
    "tokens": ("<i4",),
    "loss_mask": ("|b1",),
    "logprobs": ("<f4",),
    "weight_version": ("<i4",),
    "support_logprobs": ("<f4",),
    "routing.experts": ("|u1", "<u2"),
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
    digest: str
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
        "routing.experts": t.routing_experts,
        "sampling_mask.indptr": t.sampling_mask.indptr if t.sampling_mask else None,
        "sampling_mask.ids": t.sampling_mask.ids if t.sampling_mask else None,
        "step_rewards.positions": t.step_rewards.positions if t.step_rewards else None,
        "step_rewards.values": t.step_rewards.values if t.step_rewards else None,
        "teacher_logprobs": t.teacher_logprobs,
        "teacher_topk.ids": t.teacher_topk.ids if t.teacher_topk else None,
        "teacher_topk.values": t.teacher_topk.values if t.teacher_topk else None,
    }
    return {name: array for name, array in found.items() if array is not None}


def encode(t: Trajectory) -> tuple[TrajectoryHeader, list[Frame]]:
    """Header and frames of a trajectory; frames stand in the order of `header.frames`."""
    specs: list[FrameSpec] = []
    frames: list[Frame] = []
    for field, array in arrays_of(t).items():
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        specs.append(FrameSpec(field, little.dtype.str, tuple(little.shape)))
        frames.append(little.reshape(-1).view(np.uint8).data)
    versions = t.weight_version[t.loss_mask]
    header = TrajectoryHeader(
        schema=SCHEMA,
        identity=t.identity,
        policy=t.policy,
        segments=t.segments,
        length=t.length,
        sampled=int(t.loss_mask.sum()),
        oldest_version=int(versions.min()) if versions.size else -1,
        newest_version=int(versions.max()) if versions.size else -1,
        routing_runs=t.routing_runs,
        digest=binding_digest(t.tokens, t.routing_experts, t.sampling_mask),
        rewards=t.rewards,
        score_status=t.score_status,
        teacher_version=t.teacher_version,
        metadata=t.metadata,
        frames=tuple(specs),
    )
    return header, frames


def check_header(h: TrajectoryHeader) -> None:
    """Raise `ContractViolation` if the header is of another schema or names an unknown field or element type."""
    name = h.identity.trajectory
    if h.schema != SCHEMA:
        raise ContractViolation(f"trajectory {name}: schema {h.schema}, this build reads {SCHEMA}")
    seen: set[str] = set()
    for spec in h.frames:
        if spec.field not in FIELDS or spec.dtype not in FIELDS[spec.field] or spec.field in seen:
            raise ContractViolation(f"trajectory {name}: frame {spec.field!r} of type {spec.dtype!r} is not allowed")
        if any(n < 0 for n in spec.shape):
            raise ContractViolation(f"trajectory {name}: frame {spec.field!r} has the shape {spec.shape}")
        seen.add(spec.field)
    missing = {"tokens", "loss_mask", "logprobs", "weight_version"} - seen
    if missing:
        raise ContractViolation(f"trajectory {name}: frames missing: {', '.join(sorted(missing))}")
    for pair in PAIRS:
        if len(seen.intersection(pair)) == 1:
            raise ContractViolation(f"trajectory {name}: of {' and '.join(pair)} only one frame is there")


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
    """The whole trajectory. Raises `ContractViolation` where bytes, shapes or the binding digest do not fit."""
    return assemble(h, decode_arrays(h, frames))


def check_binding(h: TrajectoryHeader, a: Mapping[str, np.ndarray]) -> SamplingMask | None:
    """The sampling mask. Raises `ContractViolation` if it or the routing rows are not those of these tokens."""
    mask = SamplingMask(a["sampling_mask.indptr"], a["sampling_mask.ids"]) if "sampling_mask.ids" in a else None
    if binding_digest(a["tokens"], a.get("routing.experts"), mask) != h.digest:
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: routing or sampling mask do not belong to these tokens (wrong digest)"
        )
    return mask


def assemble(h: TrajectoryHeader, a: Mapping[str, np.ndarray]) -> Trajectory:
    """A trajectory from its header and all of its arrays; the digest is checked."""
    mask = check_binding(h, a)
    return Trajectory(
        identity=h.identity,
        policy=h.policy,
        segments=h.segments,
        tokens=a["tokens"],
        loss_mask=a["loss_mask"],
        logprobs=a["logprobs"],
        weight_version=a["weight_version"],
        support_logprobs=a.get("support_logprobs"),
        routing_experts=a.get("routing.experts"),
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
