"""The bench for controlled evaluations: one model, the weights of several versions, one condition changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from moe_asyncrl.train.mismatch.align import Ints, Place, described, overlaps, places, realigned
from moe_asyncrl.train.mismatch.evaluate import Passed, Support, evaluate
from moe_asyncrl.train.mismatch.gap import Bools, Control, Floats, k3
from moe_asyncrl.train.mismatch.tokens import Tokens
from moe_asyncrl.train.passes import ModelOnRank

Weights = Literal["evaluated", "own"] | int
Rows = Literal["recorded", "live", "realigned"]
Precision = Literal["trainer", "rounded", "engine"]
COARSE, FINE = 33, 17
"""Temperatures tried in the two rounds of a fit."""
WIDEST = 4.0
"""A fitted temperature is at most so many times the trainer's, or as small a part of it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the trainer and the engine did, by the recipe."""

    temperature: float
    replay: bool
    trainer_dtype: torch.dtype
    engine_dtype: torch.dtype
    micro_batch_tokens: int = 8192


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Of one evaluation; the trainer's own unless said."""

    weights: Weights = "evaluated"
    """`own`: each token under the version that is recorded to have sampled it, where there are weights of it."""
    rows: Rows = "recorded"
    temperature: Literal["trainer", "recorded"] | float = "trainer"
    """A number is a factor on the trainer's."""
    support: Support = "recorded"
    """`full` compares with the sampler's full-vocabulary value too."""
    precision: Precision = "trainer"
    """`rounded`: the weights rounded to the engine's type; `engine`: computed in it too."""


class Lab:
    """Evaluates tokens under conditions. `sources` are weights by version, `evaluated` the one to look at."""

    def __init__(
        self,
        tokens: Tokens,
        setting: Setting,
        model: ModelOnRank,
        sources: Mapping[int, Path],
        evaluated: int,
        *,
        load: Callable[[ModelOnRank, Path], None],
        build: Callable[[torch.dtype], ModelOnRank],
    ) -> None:
        """`load` reads weights into a model in place; `build` makes a model of the same shape in another type."""
        self.tokens, self.setting, self.sources, self.evaluated = tokens, setting, sources, evaluated
        self.model, self._load, self._build = model, load, build
        self._second: ModelOnRank | None = None
        self._loaded: tuple[int, bool] | None = None
        self._realigned: list[Ints] = []
        self.places: list[Place] = []
        """Where rows were found to stand; after `find_rows`."""

    @property
    def trainer_replays(self) -> bool:
        """Whether the trainer replayed rows, and there are some."""
        return self.setting.replay and self.has_rows

    @property
    def has_rows(self) -> bool:
        """Whether any routing is recorded, for a model with routers."""
        return self.model.router_shape is not None and any(s.experts is not None for s in self.tokens.samples)

    @property
    def base(self) -> Conditions:
        """As the trainer did it."""
        return Conditions(rows="recorded" if self.trainer_replays else "live")

    def control(self, cause: str, how: str, conditions: Conditions) -> Control:
        """Evaluate under conditions."""
        trainer, applies = self.logprobs(conditions)
        return Control(cause, how, trainer, self.sampler(conditions), applies)

    def sampler(self, conditions: Conditions) -> Floats:
        """The sampler's side, [N]."""
        return self.tokens.full if conditions.support == "full" else self.tokens.sampler

    def logprobs(self, conditions: Conditions) -> tuple[Floats, Bools | None]:
        """The trainer's side, [N], and where the weights are the wanted ones; elsewhere they are the evaluated ones."""
        found, there = self._scored(conditions, self.temperatures(conditions)[:, None])
        return found[:, 0], there

    def _scored(self, conditions: Conditions, temperatures: Floats) -> tuple[Floats, Bools | None]:
        """The same at the given temperatures, [N, J]."""
        if conditions.weights != "own":
            version = self.evaluated if conditions.weights == "evaluated" else conditions.weights
            return self.run(conditions, temperatures, version).logprobs, None
        out, there = np.zeros(temperatures.shape), np.zeros(len(temperatures), dtype=bool)
        for version in sorted(set(self.tokens.version.tolist()) & set(self.sources)):
            at = self.tokens.version == version
            out[at] = self.run(conditions, temperatures, version).logprobs[at]
            there |= at
        if not there.all():
            out[~there] = self.run(conditions, temperatures, self.evaluated).logprobs[~there]
        return out, there

    def run(self, conditions: Conditions, temperatures: Floats, version: int, *, watch: bool = False) -> Passed:
        """One pass under one version's weights at the given temperatures, [N, J]."""
        rows = self._realigned if conditions.rows == "realigned" else conditions.rows
        return evaluate(
            self._with(version, conditions.precision),
            self.tokens,
            temperatures,
            support=conditions.support,
            rows=rows,
            watch=watch,
            micro_batch_tokens=self.setting.micro_batch_tokens,
        )

    def find_rows(self, own: tuple[Ints, ...]) -> str:
        """Look for shifted rows, given what the routers chose live; in words, empty if all stand where they should."""
        router = self.model.router_shape
        assert router is not None
        pairs = [
            (s.experts.astype(np.int64), s.known, o)
            for s, o in zip(self.tokens.samples, own, strict=True)
            if s.experts is not None
        ]
        whole = [(g, o) for g, known, o in pairs if known is None or bool(known.all())]
        if not whole:
            return ""
        self.places = places(overlaps([g for g, _ in whole], [o for _, o in whole], router.experts))
        self._realigned = []
        for s, o in zip(self.tokens.samples, own, strict=True):
            given = o if s.experts is None else realigned(s.experts.astype(np.int64), o, self.places)
            self._realigned.append(given if s.known is None else np.where(s.known[:, None, None], given, o))
        return described(self.places, self.model.spec.moe_layer_indices)

    def fitted(self, conditions: Conditions) -> float:
        """The factor on the trainer's temperature with which the mean k3 is least, all else as in `conditions`."""
        low, high, best = 1 / WIDEST, WIDEST, 1.0
        for count in (COARSE, FINE):
            factors = np.geomspace(low, high, count)
            temperatures = self.setting.temperature * np.repeat(factors[None], len(self.tokens.full), 0)
            found, _ = self._scored(conditions, temperatures)
            means = np.asarray([k3(self.sampler(conditions), found[:, j]).mean() for j in range(count)])
            i = int(means.argmin())
            low, high = factors[max(0, i - 1)], factors[min(count - 1, i + 1)]
            best = _vertex(np.log(factors), means, i)
        return float(np.exp(best))

    def temperatures(self, conditions: Conditions) -> Floats:
        """What each token's logits are divided by, [N]."""
        own = np.full(len(self.tokens.full), self.setting.temperature)
        if conditions.temperature == "trainer":
            return own
        if conditions.temperature == "recorded":
            return np.where(np.isnan(self.tokens.temperature), own, self.tokens.temperature)
        return own * conditions.temperature

    def _with(self, version: int, precision: Precision) -> ModelOnRank:
        """The model that has these weights, in that precision."""
        rounded = precision == "rounded"
        if self._loaded != (version, rounded):
            self._load(self.model, self.sources[version])
            if rounded:
                _round(self.model, self.setting.engine_dtype)
            self._loaded = (version, rounded)
        if precision != "engine":
            return self.model
        if self._second is None:
            self._second = self._build(self.setting.engine_dtype)
        _copy(self.model, self._second)
        return self._second


def _vertex(x: Floats, y: Floats, i: int) -> float:
    """Where the parabola through a least value and its neighbours is least; the value's own place at a border."""
    if not 0 < i < len(x) - 1 or not np.isfinite(y[i - 1 : i + 2]).all():
        return float(x[i])
    h = x[i] - x[i - 1]
    bend = y[i - 1] - 2 * y[i] + y[i + 1]
    return float(x[i]) if bend <= 0 else float(x[i] + h * (y[i - 1] - y[i + 1]) / (2 * bend))


@torch.no_grad()
def _round(model: ModelOnRank, dtype: torch.dtype) -> None:
    for chunk in model.chunks:
        for value in chunk.parameters():
            value.copy_(value.to(dtype))


@torch.no_grad()
def _copy(source: ModelOnRank, target: ModelOnRank) -> None:
    for ours, theirs in zip(source.chunks, target.chunks, strict=True):
        values = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
        for name, value in [*theirs.named_parameters(), *theirs.named_buffers()]:
            value.copy_(values[name])
