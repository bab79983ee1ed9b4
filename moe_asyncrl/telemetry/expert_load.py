"""How evenly the experts are loaded: a few figures from the tokens of each expert. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Counts = Sequence[Sequence[int]]
"""Tokens of each expert, by layer."""
EXPECTED = 8.0
"""Tokens of an expert under an even load from which an expert without any says something."""
COLLAPSED = 0.5
"""A layer in which a larger part of the experts is idle is collapsing."""


@dataclass(frozen=True)
class LayerLoad:
    """One layer with tokens."""

    busiest: float
    """Tokens of the busiest expert over an even share: 1 is even, E / K the most there can be."""
    cv: float
    """Standard deviation of the experts' tokens over their mean: 0 is even."""
    entropy: float
    """Entropy of the shares over log E: 1 is even, log K / log E means that all tokens go to the same K experts."""
    idle: int
    """Experts without a token."""
    experts: int
    tokens: int
    """Choices: tokens times experts of each."""


@dataclass(frozen=True)
class Load:
    """All layers of one side."""

    busiest: float
    """Mean of the layers."""
    cv: float
    """Mean of the layers."""
    entropy: float
    """Least of the layers: one that collapses shows, however many do not."""
    idle: int
    """Sum of the layers."""


def layer_load(counts: Sequence[int]) -> LayerLoad | None:
    """Figures of one layer; None without a token."""
    n = np.asarray(counts, dtype=np.float64)
    total = float(n.sum())
    if total <= 0:
        return None
    share = n / total
    used = share[share > 0]
    # One expert alone is even by definition.
    entropy = float(-(used * np.log(used)).sum()) / math.log(len(n)) if len(n) > 1 else 1.0
    mean = total / len(n)
    return LayerLoad(
        busiest=float(n.max()) / mean,
        cv=float(n.std()) / mean,
        entropy=entropy,
        idle=int((n == 0).sum()),
        experts=len(n),
        tokens=int(total),
    )


def load_of(counts: Counts) -> Load | None:
    """Figures of a side; None if no layer has tokens."""
    layers = [found for c in counts if (found := layer_load(c)) is not None]
    if not layers:
        return None
    return Load(
        busiest=sum(x.busiest for x in layers) / len(layers),
        cv=sum(x.cv for x in layers) / len(layers),
        entropy=min(x.entropy for x in layers),
        idle=sum(x.idle for x in layers),
    )


def load_fields(sampler: Counts, trainer: Counts) -> dict[str, float | int]:
    """Fields of a `probe` record, sampler's and trainer's side by side; empty without tokens."""
    fields: dict[str, float | int] = {}
    for side, counts in (("sampler", sampler), ("trainer", trainer)):
        found = load_of(counts)
        if found is not None:
            fields[f"load_busiest_{side}"] = found.busiest
            fields[f"load_cv_{side}"] = found.cv
            fields[f"load_entropy_{side}"] = found.entropy
            fields[f"idle_experts_{side}"] = found.idle
    return fields


def collapsing(layers: Sequence[int], counts: Counts) -> list[int]:
    """Layers in which most experts are idle though there were tokens enough for all of them."""
    found = []
    for layer, c in zip(layers, counts, strict=True):
        x = layer_load(c)
        if x is not None and x.tokens >= EXPECTED * x.experts and x.idle > COLLAPSED * x.experts:
            found.append(layer)
    return found
