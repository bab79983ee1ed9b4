"""The part of a batch's routing rows that one trainer rank is sent: what to ask for, and what the answer holds. Pure.

    rows that the rank routes, layers that it has ─▶ cuts of frames ─▶ (the buffer) ─▶ slices, checked row by row

A row that several trajectories share is asked for once. Layers are asked for in whole blocks (`data/digest.py`), since
a block is what a digest binds; with blocks cut like the pipeline stages these are the rank's own layers and no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.digest import Experts, row_digests
from moe_asyncrl.data.messages import RowCut
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import Frame, TrajectoryHeader, check_block, routing_spec

Rows = npt.NDArray[np.int64]
Needs = Mapping[str, Rows]
"""By trajectory the numbers of the routing rows that are needed, int64, rising."""


@dataclasses.dataclass(frozen=True)
class RowSlice:
    """Some routing rows of a trajectory, checked."""

    rows: Rows
    """int64 [m]: their numbers, rising."""
    experts: Experts
    """[m, layers that were asked for, K]"""


def blocks_of_layers(h: TrajectoryHeader, layers: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the header's blocks that have one of the MoE layers."""
    return tuple(i for i, b in enumerate(h.routing_blocks) if any(b.start <= layer < b.end for layer in layers))


def ranges_of(rows: Rows) -> tuple[tuple[int, int], ...]:
    """Rising numbers as runs [start, end)."""
    if not len(rows):
        return ()
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.concatenate([[0], breaks])]
    ends = rows[np.concatenate([breaks - 1, [len(rows) - 1]])] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def stored_rows(headers: Mapping[str, TrajectoryHeader], needs: Needs) -> dict[str, Rows]:
    """By trajectory, which rows of the frame that it carries itself are needed: each once, whoever shares it."""
    found: dict[str, list[Rows]] = {}
    for name, rows in needs.items():
        for frame, part in _parts(headers[name], rows):
            if len(part):
                found.setdefault(frame, []).append(part)
    return {name: parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts)) for name, parts in found.items()}


def cuts_of(stored: Mapping[str, Rows]) -> list[RowCut]:
    """What to ask for."""
    return [RowCut(name, ranges_of(rows)) for name, rows in stored.items()]


def cut_bytes(h: TrajectoryHeader, rows: int, blocks: Sequence[int]) -> int:
    """Bytes of a frame of `rows` rows of some blocks."""
    spec = routing_spec(h)
    return 0 if spec is None else rows * _layers(h, blocks) * spec.shape[2] * np.dtype(spec.dtype).itemsize


def cut_array(h: TrajectoryHeader, frame: Frame, rows: int, blocks: Sequence[int]) -> Experts:
    """[rows, layers of the blocks, K] of a frame that came. Raises `ContractViolation` if it has another size."""
    spec = routing_spec(h)
    if spec is None or len(frame) != cut_bytes(h, rows, blocks):
        raise ContractViolation(
            f"trajectory {h.identity.trajectory}: {len(frame)} bytes of routing rows came, {rows} rows of the layer "
            f"blocks {list(blocks)} were asked for"
        )
    return np.frombuffer(frame, dtype=np.dtype(spec.dtype)).reshape(rows, _layers(h, blocks), spec.shape[2])


def digest_columns(h: TrajectoryHeader, frame: Frame, blocks: Sequence[int]) -> npt.NDArray[np.uint32]:
    """uint32 [blocks, T-1] of a frame that came, checked against the header. Raises `ContractViolation`."""
    if len(frame) != 4 * len(blocks) * (h.length - 1):
        raise ContractViolation(f"trajectory {h.identity.trajectory}: {len(frame)} bytes of row digests came")
    columns = np.frombuffer(frame, dtype="<u4").reshape(len(blocks), h.length - 1)
    for i, column in zip(blocks, columns, strict=True):
        check_block(h, h.routing_blocks[i], column)
    return columns


def slice_of(
    h: TrajectoryHeader,
    rows: Rows,
    layers: Sequence[int],
    blocks: Sequence[int],
    *,
    stored: Mapping[str, Rows],
    arrays: Mapping[str, Experts],
    tokens: npt.NDArray[np.int32],
    columns: npt.NDArray[np.uint32],
) -> RowSlice:
    """Rows `rows` of MoE layers `layers`, put together from the frames that came and checked row by row.

    `stored` and `arrays`: by trajectory, numbers and experts [m, layers of `blocks`, K] of the rows that came.
    `columns`: uint32 [blocks, T-1], checked. The header's root has been checked against `tokens`.

    Raises `ContractViolation`, naming trajectory, row and layers, if a row is not the one of its token.
    """
    parts = [_picked(stored[f], arrays[f], part) for f, part in _parts(h, rows) if len(part)]
    spec = routing_spec(h)
    assert spec is not None and len(blocks) == len(columns)
    whole: Any = parts[0] if len(parts) == 1 else np.concatenate(parts or [cut_array(h, b"", 0, blocks)])
    at, here = 0, []
    for i, column in zip(blocks, columns, strict=True):
        b = h.routing_blocks[i]
        size = b.end - b.start
        found = row_digests(whole[:, at : at + size], tokens[rows], rows, first_layer=b.start)
        wrong = np.flatnonzero(found != column[rows])
        if len(wrong):
            raise ContractViolation(
                f"trajectory {h.identity.trajectory}: routing row {int(rows[wrong[0]])}, MoE layers {b.start} to "
                f"{b.end - 1}: it does not belong to its token (wrong digest)"
            )
        here += list(range(b.start, b.end))
        at += size
    if here != list(layers):
        whole = whole[:, [here.index(layer) for layer in layers]]
    return RowSlice(rows=rows, experts=whole)


def _layers(h: TrajectoryHeader, blocks: Sequence[int]) -> int:
    return sum(h.routing_blocks[i].end - h.routing_blocks[i].start for i in blocks)


def _parts(h: TrajectoryHeader, rows: Rows) -> list[tuple[str, Rows]]:
    """Frame and rows in it of the needed rows of one trajectory, in order."""
    if h.shared_rows is None:
        return [(h.identity.trajectory, rows)]
    split = int(np.searchsorted(rows, h.shared_rows.rows))
    return [(h.shared_rows.trajectory, rows[:split]), (h.identity.trajectory, rows[split:] - h.shared_rows.rows)]


def _picked(stored: Rows, array: Experts, wanted: Rows) -> Experts:
    if len(stored) == len(wanted):
        return array
    return array[np.searchsorted(stored, wanted)]
