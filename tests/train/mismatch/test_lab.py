"""The bench: which weights a condition is evaluated under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_asyncrl.train.mismatch.evaluate import Passed
from moe_asyncrl.train.mismatch.gap import Floats
from moe_asyncrl.train.mismatch.lab import Conditions, Lab, Setting, Weights
from moe_asyncrl.train.mismatch.tokens import Tokens, Truncation

N = 6
BEST = {1: 0.5, 2: 3.0}
"""By version, the temperature at which its weights give each token what the sampler gave it."""


class Numbers(Lab):
    """Instead of a model: a log-probability that falls with the distance from a version's best temperature."""

    def run(self, conditions: Conditions, temperatures: Floats, version: int, *, watch: bool = False) -> Passed:
        return Passed(-1.0 - np.log(temperatures / BEST[version]) ** 2, None, None)


def bench(versions: list[int]) -> Numbers:
    none = Truncation(np.zeros(N, dtype=np.int64), np.ones(N), np.zeros(N))
    tokens = Tokens(
        samples=(),
        full=np.full(N, -1.0),
        support=np.full(N, np.nan),
        kept=(None,) * N,
        version=np.array(versions),
        temperature=np.full(N, np.nan),
        truncation=none,
        owner=np.arange(N),
    )
    setting = Setting(temperature=1.0, replay=False, trainer_dtype=torch.float32, engine_dtype=torch.float32)
    model: Any = None
    sources = {v: Path(str(v)) for v in BEST}
    return Numbers(tokens, setting, model, sources, 2, load=lambda *_: None, build=lambda _: model)


@pytest.mark.parametrize(
    ("weights", "versions", "best"),
    [("evaluated", [1] * N, 3.0), ("own", [1] * N, 0.5), (1, [2] * N, 0.5), ("own", [2] * N, 3.0)],
)
def test_a_temperature_is_fitted_under_the_weights_of_the_condition(
    weights: Weights, versions: list[int], best: float
) -> None:
    """With stale weights controlled, a temperature fitted under the evaluated ones would stand in for staleness."""
    assert bench(versions).fitted(Conditions(rows="live", weights=weights)) == pytest.approx(best, rel=1e-2)


def test_each_token_is_scored_under_its_own_version_where_there_are_weights_of_it() -> None:
    found, there = bench([1, 1, 2, 2, 7, 7]).logprobs(Conditions(rows="live", weights="own"))
    first, second = (-1.0 - np.log(BEST[v]) ** 2 for v in (1, 2))
    np.testing.assert_allclose(found, [first] * 2 + [second] * 4)
    assert there is not None and there.tolist() == [True] * 4 + [False] * 2
