"""Do routing rows stand at the right layer and token? Recorded rows against what the trainer's routers choose live.

Pure functions on arrays: R rows, L MoE layers, K experts of E. If the rows of a layer agree with the trainer's choices
of that layer no better than chance, but with those of another layer, or of the token before, they were shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

STEPS = (0, 1, -1)
"""Tokens that rows may be off by; 0 first, as it wins a tie."""
MARGIN = 0.2
"""A shifted alignment must agree by so much more, as a part of K experts, to be believed."""
ROWS = 4096
"""Rows that the search looks at, at most."""


@dataclass(frozen=True)
class Place:
    """Where the rows of one MoE layer were found."""

    layer: int
    """Number among the MoE layers of the model."""
    source: int | None
    """Layer under which they stand; None if they stand nowhere."""
    step: int
    """The row of token i stands at token i + step."""
    agreement: float
    """Mean part of the K experts that the rows as recorded share with the trainer's live choice."""
    best: float
    """The same at the place that was found."""
    holds: int | None = None
    """Layer whose rows stand here instead, where that is clear."""

    @property
    def right(self) -> bool:
        """Whether the rows stand where they should."""
        return self.source == self.layer and self.step == 0


def overlaps(recorded: Sequence[Ints], own: Sequence[Ints], experts: int) -> Floats:
    """Mean overlap [len(STEPS), L, L] of the trainer's choice in layer l (row) with the rows of layer m (column).

    `recorded` and `own` are lists over trajectories of [R, L, K]. Trajectories shorter than two rows are left out.
    """
    layers, top_k = own[0].shape[1:]
    total, rows = np.zeros((len(STEPS), layers, layers)), np.zeros(len(STEPS))
    for given, chosen in zip(recorded, own, strict=True):
        if len(given) < 2 or rows[0] >= ROWS:
            continue
        a, b = _one_hot(given, experts), _one_hot(chosen, experts)
        for i, step in enumerate(STEPS):
            x, y = _stepped(a, b, step)
            n = len(x)
            total[i] += y.transpose(1, 0, 2).reshape(layers, -1) @ x.transpose(1, 0, 2).reshape(layers, -1).T
            rows[i] += n
    return total / np.maximum(rows, 1)[:, None, None] / top_k


def places(overlap: Floats) -> list[Place]:
    """For each MoE layer, where its rows stand, from `overlaps`."""
    found = []
    layers = overlap.shape[1]
    for layer in range(layers):
        here = float(overlap[0, layer, layer])
        i, source = np.unravel_index(int(overlap[:, layer].argmax()), overlap[:, layer].shape)
        best = float(overlap[i, layer, source])
        # What stands here may be another layer's rows, which then are here twice and this layer's own nowhere.
        column = overlap[0, :, layer]
        owner = int(column.argmax())
        foreign = owner if owner != layer and float(column[owner]) >= here + MARGIN else None
        if best >= here + MARGIN:
            found.append(Place(layer, int(source), STEPS[int(i)], here, best, foreign))
        elif foreign is not None:
            found.append(Place(layer, None, 0, here, here, foreign))
        else:
            found.append(Place(layer, layer, 0, here, here))
    return found


def realigned(recorded: Ints, own: Ints, found: Sequence[Place]) -> Ints:
    """Rows [R, L, K] moved to where they belong; what stands nowhere is the trainer's own choice."""
    out = recorded.copy()
    rows = len(recorded)
    for p in found:
        if p.right:
            continue
        out[:, p.layer] = own[:, p.layer]
        if p.source is not None:
            at = np.arange(rows)
            there = (at + p.step >= 0) & (at + p.step < rows)
            out[there, p.layer] = recorded[at[there] + p.step, p.source]
    return out


def described(found: Sequence[Place], layers: Sequence[int]) -> str:
    """The shifts in words; `layers` are the numbers of the MoE layers in the model."""
    parts = []
    for p in found:
        if p.right:
            continue
        if p.source is None:
            parts.append(f"layer {layers[p.layer]} has the rows of layer {layers[p.holds or 0]}, its own are nowhere")
            continue
        where = [] if p.source == p.layer else [f"layer {layers[p.source]}"]
        where += [] if p.step == 0 else ["the next token" if p.step > 0 else "the token before"]
        parts.append(f"rows of layer {layers[p.layer]} stand at {' and '.join(where)}")
    more = f"; and {len(parts) - 4} more layers" if len(parts) > 4 else ""
    return "; ".join(parts[:4]) + more


def _one_hot(rows: Ints, experts: int) -> npt.NDArray[np.float32]:
    out = np.zeros((*rows.shape[:2], experts), dtype=np.float32)
    np.put_along_axis(out, rows.astype(np.int64), 1.0, axis=2)
    return out


def _stepped(
    given: npt.NDArray[np.float32], chosen: npt.NDArray[np.float32], step: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Pairs (given[i + step], chosen[i])."""
    if step == 0:
        return given, chosen
    return (given[step:], chosen[:-step]) if step > 0 else (given[:step], chosen[-step:])
