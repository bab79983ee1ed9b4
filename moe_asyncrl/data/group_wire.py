"""A group on the wire: leading routing rows that its trajectories have in common travel once.

The first trajectory with rows has all of its own. Another one whose rows begin as those do, behind the same tokens,
refers to them (`TrajectoryHeader.shared_rows`) and carries only what comes after. Rows that differ, be it in one expert
of one layer, are each its own; so are versions and sources, which stand in each header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import (
    ROUTING,
    Blocks,
    Frame,
    SharedRows,
    TrajectoryHeader,
    assemble,
    decode_arrays,
    encode,
)


def encode_group(
    trajectories: Sequence[Trajectory], *, blocks: Blocks = ()
) -> tuple[tuple[TrajectoryHeader, ...], list[Frame]]:
    """Headers and all frames of a group, in order; `blocks` as in `encode`."""
    owner: Trajectory | None = None
    headers: list[TrajectoryHeader] = []
    frames: list[Frame] = []
    for t in trajectories:
        same = 0 if owner is None else common_rows(owner, t)
        shared = SharedRows(owner.identity.trajectory, same) if owner is not None and same else None
        if owner is None and t.routing_experts is not None:
            owner = t
        header, own = encode(t, blocks=blocks, shared=shared)
        headers.append(header)
        frames.extend(own)
    return tuple(headers), frames


def common_rows(a: Trajectory, b: Trajectory) -> int:
    """Leading routing rows that two trajectories have in common, behind the same tokens."""
    x, y = a.routing_experts, b.routing_experts
    if x is None or y is None or x.dtype != y.dtype or x.shape[1:] != y.shape[1:]:
        return 0
    tokens = _leading(a.tokens[:-1], b.tokens[:-1])
    return _leading(x[:tokens], y[:tokens])


def _leading(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    if np.array_equal(a[:n], b[:n]):
        return n
    same = (a[:n] == b[:n]).reshape(n, -1).all(axis=1)
    return int(np.argmin(same))


def arrays_of_group(
    headers: Sequence[TrajectoryHeader], frames: Sequence[Frame]
) -> dict[str, dict[str, npt.NDArray[np.generic]]]:
    """Arrays by trajectory and field, all rows included, from all frames of a group in order.

    Raises `ContractViolation`: frames that do not fit their headers, a trajectory twice, rows shared with one that is
    not in the group or shares its own. Digests are not checked here.
    """
    found: dict[str, dict[str, npt.NDArray[np.generic]]] = {}
    at = 0
    for h in headers:
        name = h.identity.trajectory
        if name in found:
            raise ContractViolation(f"trajectory {name} is there twice in its group")
        found[name] = decode_arrays(h, frames[at : at + len(h.frames)])
        at += len(h.frames)
    if at != len(frames):
        raise ContractViolation(f"{len(frames)} frames arrived for a group whose headers list {at}")
    whole = {h.identity.trajectory: found[h.identity.trajectory].get(ROUTING) for h in headers if not h.shared_rows}
    for h in headers:
        if h.shared_rows is not None:
            own = found[h.identity.trajectory]
            own[ROUTING] = joined(h, whole.get(h.shared_rows.trajectory), own[ROUTING])
    return found


def joined(h: TrajectoryHeader, owner: np.ndarray | None, own: np.ndarray) -> np.ndarray:
    """All rows of a trajectory from those of the one that it shares with. Raises `ContractViolation` if it cannot."""
    assert h.shared_rows is not None
    rows, name = h.shared_rows.rows, h.shared_rows.trajectory
    if owner is None or len(owner) < rows or owner.dtype != own.dtype or owner.shape[1:] != own.shape[1:]:
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: shares {rows} routing rows with {name}, which does not have them"
        )
    return np.concatenate([owner[:rows], own])


def decode_group(headers: Sequence[TrajectoryHeader], frames: Sequence[Frame]) -> tuple[Trajectory, ...]:
    """The whole group. Raises `ContractViolation` where bytes, shapes or digests do not fit."""
    arrays: Mapping[str, Mapping[str, np.ndarray]] = arrays_of_group(headers, frames)
    return tuple(assemble(h, arrays[h.identity.trajectory]) for h in headers)
