"""The arithmetic of gaps, drops and alignments, on arrays whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.algorithms import kl
from moe_asyncrl.train.mismatch.align import described, overlaps, places, realigned
from moe_asyncrl.train.mismatch.causes import neighbours
from moe_asyncrl.train.mismatch.gap import Control, clustered_error, finding_of, gap_of, k3, ranked
from moe_asyncrl.train.mismatch.values import Asked, label_logprobs, truncated_support
from tests.train.mismatch.drift import slope_of

DRAW = np.random.default_rng(0)
E, K, L = 16, 2, 6


def test_k3_is_the_trainers() -> None:
    s, t = DRAW.normal(size=100), DRAW.normal(size=100)
    assert np.allclose(k3(s, t), kl.k3(torch.from_numpy(s), torch.from_numpy(t)).numpy(), rtol=0, atol=1e-15)


def test_a_drop_is_the_difference_of_two_gaps_where_the_control_applies() -> None:
    sampler, base = np.zeros(4), np.asarray([0.1, 0.2, 0.3, 0.4])
    owner = np.asarray([0, 0, 1, 1])
    control = Control("weights", "how", np.zeros(4), np.zeros(4), np.asarray([True, False, False, True]))
    found = finding_of(sampler, base, control, owner)
    each = np.expm1(base) - base
    assert found.drop == pytest.approx((each[0] + each[3]) / 4)
    assert found.gap.kl == pytest.approx((each[1] + each[2]) / 4) and found.gap.max_abs == pytest.approx(0.3)
    assert found.drop_abs == pytest.approx(0.125) and found.tokens == 2
    assert found.share == pytest.approx(found.drop / gap_of(sampler, base, owner).kl)
    worse = finding_of(sampler, base, Control("weights", "worse", base + 1, sampler), owner)
    other = finding_of(sampler, base, Control("rows", "none", base, sampler), owner)
    assert [f.how for f in ranked([worse, other, found])] == ["how", "none"]
    assert not other.named and not worse.named


def test_the_error_of_a_mean_counts_trajectories_and_not_tokens() -> None:
    values = DRAW.normal(size=50)
    each = np.arange(50)
    assert clustered_error(values, each) == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    # Ten copies of each token in one trajectory tell nothing new.
    assert clustered_error(np.repeat(values, 10), np.repeat(each, 10)) == pytest.approx(clustered_error(values, each))
    assert math.isnan(clustered_error(values, np.zeros(50)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, L - 1), st.sampled_from(["next", "before", "swap", "copy", "none", "all"]), st.integers(0, 2**20))
def test_a_shift_is_found_and_undone(layer: int, plant: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    own = [np.sort(np.argsort(draw.random((n, L, E)), -1)[..., :K], -1) for n in (40, 60, 1, 50)]
    other = (layer + 1) % L
    recorded = [o.copy() for o in own]
    for r in recorded:
        r[...] = r[..., ::-1]  # a router's order says nothing
        if plant == "next":
            r[:, layer] = np.roll(r[:, layer], 1, 0)
        elif plant == "before":
            r[:, layer] = np.roll(r[:, layer], -1, 0)
        elif plant == "swap":
            r[:, [layer, other]] = r[:, [other, layer]]
        elif plant == "copy":
            r[:, layer] = r[:, other]
        elif plant == "all":
            r[...] = np.roll(r, 1, axis=1)
    found = places(overlaps(recorded, own, E))
    wrong = [p for p in found if not p.right]
    assert len(wrong) == {"none": 0, "swap": 2, "all": L}.get(plant, 1)
    assert bool(described(found, range(L))) == bool(wrong)
    for r, o in zip(recorded, own, strict=True):
        assert (np.sort(realigned(r, o, found), -1) == o).all()


def test_log_probabilities_against_float64() -> None:
    logits = torch.from_numpy(DRAW.normal(size=(5, 40)) * 3)
    labels = torch.tensor([3, 0, 39, 7, 7])
    temperatures = torch.tensor([[1.0, 0.5]] * 4 + [[2.0, 0.7]])
    kept = [None, np.asarray([0, 4, 5], np.int32), None, np.asarray([7], np.int32), np.asarray([1, 7], np.int32)]
    found = label_logprobs(logits.float(), Asked(labels, temperatures, kept)).double()
    for i, ids in enumerate(kept):
        for j in range(2):
            z = logits[i] / temperatures[i, j].double()
            among = z if ids is None else z[torch.from_numpy(ids.astype(np.int64))]
            assert found[i, j].item() == pytest.approx((z[labels[i]] - among.logsumexp(0)).item(), abs=1e-5)


def test_supports_by_hand() -> None:
    scaled = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4, 1)
    limits = torch.tensor([[0, 1.0, 0.0], [2, 1.0, 0.0], [0, 0.7, 0.0], [0, 1.0, 0.31]])
    kept = truncated_support(scaled, limits).tolist()
    assert kept == [[True] * 4, [True, True, False, False], [True, True, False, False], [True, True, False, False]]
    limits = torch.tensor([[0, 0.81, 0.0]] * 2 + [[3, 0.81, 0.2]] * 2)
    assert truncated_support(scaled, limits).sum(1).tolist() == [3, 3, 3, 3]


def test_versions_beside_the_evaluated_one() -> None:
    assert neighbours([0, 20, 40, 60, 80], 60) == [40, 20, 80]
    assert neighbours([3], 3) == []


def test_a_slope_and_its_error() -> None:
    """Over many draws, a line's slope is found, and its error is how far the found ones spread."""
    x = np.arange(40.0)
    found = [slope_of(x, 0.3 * x + DRAW.normal(size=40) * (1 + x / 20)) for _ in range(400)]
    slopes = np.asarray([f.slope for f in found])
    assert slopes.mean() == pytest.approx(0.3, abs=4 * slopes.std() / 20)
    assert np.mean([f.error for f in found]) == pytest.approx(slopes.std(), rel=0.15)
    still = [abs(slope_of(x, DRAW.normal(size=40)).score) <= 3 for _ in range(200)]
    assert np.mean(still) > 0.97 and slope_of(x, x + DRAW.normal(size=40)).score > 30
    with pytest.raises(ValueError, match="at least 4"):
        slope_of([1, 2, 3], [1, 2, 3])
