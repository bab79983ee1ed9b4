"""Routing rows of other weights than their token's: used, their tokens masked, or the trajectory dropped."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_asyncrl.algorithms.aggregation import token_weights
from moe_asyncrl.config.recipe import Algorithm
from moe_asyncrl.data.messages import HeldGroup, Ticket
from moe_asyncrl.data.provenance import other_version
from moe_asyncrl.data.trajectory import RoutingRun, Trajectory
from moe_asyncrl.data.wire import arrays_of, encode
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.replay.rows import coverage
from moe_asyncrl.train.fetch import sample_from
from moe_asyncrl.train.loop import _policy_fields
from moe_asyncrl.train.metrics import StepMetrics
from moe_asyncrl.train.plan import OtherVersion, plan_batch
from tests.data.samples import trajectory


def run(start: int, end: int, version: int, source: str = "sampled") -> RoutingRun:
    return RoutingRun(start=start, end=end, version=version, source=source)  # type: ignore[arg-type]


def reread(sample: int = 0) -> Trajectory:
    """12 tokens, 6 of them sampled by version 4; rows 0-2 are cached ones of version 3, rows 6 and 7 of version 5."""
    runs = (run(0, 3, 3, "cached"), run(3, 6, 4, "prefilled"), run(6, 8, 5, "prefilled"), run(8, 11, 4))
    t = trajectory(0, 0, sample, version=4)
    return dataclasses.replace(t, routing_runs=runs, rewards={"total": float(sample)})


def plain(sample: int) -> Trajectory:
    return dataclasses.replace(trajectory(0, 0, sample, version=4), rewards={"total": float(sample)})


def test_rows_are_compared_with_the_token_that_they_predict() -> None:
    t = reread()
    found = other_version(t.routing_runs, t.loss_mask, t.weight_version)
    assert np.flatnonzero(found).tolist() == [0, 1, 2, 6, 7]
    h = encode(t)[0]
    assert (h.other_version_rows, h.other_version_sampled) == (5, 2)
    assert coverage(t.routing_runs, t.loss_mask, t.weight_version).same_version == 6
    unknown = dataclasses.replace(t, routing_runs=(run(0, 5, 4), run(5, 8, -1), run(8, 11, -1, "missing")))
    assert encode(unknown)[0].other_version_rows == 3, (
        "what is not known is not taken for right, what is missing not there"
    )


@pytest.mark.parametrize(
    ("policy", "names", "counts"),
    [("use", ["0.0.0", "0.0.1"], [6, 6]), ("mask", ["0.0.0", "0.0.1"], [4, 6]), ("drop", ["0.0.1"], [6])],
)
def test_the_plan_does_what_the_recipe_says(policy: OtherVersion, names: list[str], counts: list[int]) -> None:
    import torch

    headers = tuple(encode(t)[0] for t in (reread(0), plain(1)))
    group = HeldGroup(ticket=Ticket(index=0, attempt=0), headers=headers)
    plan = plan_batch([group], Algorithm(), Layout(), micro_batch_tokens=64, other_version=policy)
    (update,) = plan.updates
    assert [h.identity.trajectory for h in update.headers] == names
    expected = token_weights(torch.tensor(counts), Algorithm().aggregation).tolist()
    assert update.weights == pytest.approx(expected)
    assert plan.dropped == (policy == "drop")
    figures = StepMetrics(
        loss=0.0, grad_norm=0.0, lr=0.0, tokens=0, sequences=0, positions=0, padding=0.0, micro_batches=1, seconds=1.0
    )
    assert _policy_fields(5, plan, figures)["dropped_other_version"] == plan.dropped


def test_a_prompt_read_by_other_weights_drops_its_trajectory_and_masks_nothing() -> None:
    """The prompt's rows predict no sampled token, and yet all tokens behind attend to what they made."""
    cached = (run(0, 3, 3, "cached"), run(3, 11, 4))
    headers = tuple(encode(t)[0] for t in (dataclasses.replace(reread(0), routing_runs=cached), plain(1), plain(2)))
    assert (headers[0].other_version_rows, headers[0].other_version_sampled) == (3, 0)
    group = HeldGroup(ticket=Ticket(index=0, attempt=0), headers=headers)
    for policy, count in (("use", 3), ("mask", 3), ("drop", 2)):
        plan = plan_batch([group], Algorithm(), Layout(), micro_batch_tokens=64, other_version=policy)  # type: ignore[arg-type]
        assert (len(plan.updates[0].headers), plan.dropped) == (count, 3 - count)


@pytest.mark.parametrize("mask_other", [False, True])
def test_masked_tokens_are_those_that_the_rows_predict(mask_other: bool) -> None:
    t = reread()
    header, _ = encode(t)
    s = sample_from(
        header, arrays_of(t), None, weight=0.1, advantage=1.0, vocabulary=1000, temperature=None, mask_other=mask_other
    )
    out = [7, 8] if mask_other else []
    assert np.flatnonzero(s.trained).tolist() == [i for i in range(6, 12) if i not in out]
    assert s.trained.sum() == header.sampled - (header.other_version_sampled if mask_other else 0)
