"""Cuts routing rows to what one trainer rank asks for: rows of its positions, layers of its blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.messages import RowCut
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import ROUTING, Frame, TrajectoryHeader, array_from, routing_spec

DIGESTS = "routing.digests"
"""What frames of row digests are called in a reply."""
RowDigests = tuple[npt.NDArray[np.uint32], ...]
"""uint32 [T-1] for each block of a trajectory, in order."""


def cut_frame(
    h: TrajectoryHeader, frames: Mapping[tuple[str, str], Frame], cut: RowCut, blocks: Sequence[int]
) -> Frame:
    """The bytes of [rows of the cut, layers of the blocks, K]. Raises `ContractViolation` for what is not there."""
    name, spec = h.identity.trajectory, routing_spec(h)
    if spec is None:
        raise ContractViolation(f"trajectory {name} has no routing rows")
    rows = array_from(spec, frames[name, ROUTING], trajectory=name)
    at = 0
    for a, b in cut.ranges:
        if not at <= a < b <= len(rows):
            raise ContractViolation(f"trajectory {name}: rows {list(cut.ranges)} of {len(rows)} were asked for")
        at = b
    chosen = [h.routing_blocks[i] for i in _checked(blocks, len(h.routing_blocks), name)]
    # One run of layers at a time: blocks that follow each other are one.
    runs: list[list[int]] = []
    for block in chosen:
        if runs and runs[-1][1] == block.start:
            runs[-1][1] = block.end
        else:
            runs.append([block.start, block.end])
    out = np.empty(
        (sum(b - a for a, b in cut.ranges), sum(b - a for a, b in runs), spec.shape[2]), dtype=np.dtype(spec.dtype)
    )
    at = 0
    for a, b in cut.ranges:
        layer = 0
        for first, last in runs:
            out[at : at + b - a, layer : layer + last - first] = rows[a:b, first:last]
            layer += last - first
        at += b - a
    return out.reshape(-1).view(np.uint8).data


def cut_digests(trajectory: str, digests: Mapping[str, RowDigests], blocks: Sequence[int]) -> Frame:
    """The bytes of uint32 [blocks, T-1]. Raises `ContractViolation` for what is not there."""
    own = digests.get(trajectory)
    if own is None:
        raise ContractViolation(f"trajectory {trajectory} has no routing rows")
    chosen = [own[i] for i in _checked(blocks, len(own), trajectory)]
    return np.ascontiguousarray(np.stack(chosen), dtype="<u4").reshape(-1).view(np.uint8).data


def _checked(blocks: Sequence[int], count: int, trajectory: str) -> Sequence[int]:
    if not blocks or list(blocks) != sorted(set(blocks)) or blocks[0] < 0 or blocks[-1] >= count:
        raise ContractViolation(f"trajectory {trajectory}: blocks {list(blocks)} of {count} were asked for")
    return blocks
