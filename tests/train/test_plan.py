"""From headers to updates: who is trained, how much each token counts, and that every rank agrees."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.config.recipe import Algorithm
from moe_asyncrl.data.messages import HeldGroup, Ticket
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.wire import encode
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.plan import advantages_of, crossover_length, plan_batch, split_evenly
from tests.data.samples import trajectory
from tests.train.parity_jobs import tiny_spec


def held(index: int, rewards: list[float | None], lengths: list[int] | None = None) -> HeldGroup:
    """A group; a reward of None is a failed score."""
    made = []
    for i, reward in enumerate(rewards):
        t = trajectory(index, 0, i, tokens=(lengths or [12] * len(rewards))[i])
        made.append(dataclasses.replace(t, rewards={} if reward is None else {"total": reward}))
    return HeldGroup(ticket=Ticket(index=index, attempt=0), headers=tuple(encode(t)[0] for t in made))


def names(plan: object) -> list[str]:
    return [h.identity.trajectory for u in plan.updates for h in u.headers]  # type: ignore[attr-defined]


def test_advantages_are_relative_to_the_group() -> None:
    plan = plan_batch([held(0, [1.0, 0.0]), held(1, [5.0, 5.0])], Algorithm(), Layout(), micro_batch_tokens=64)
    (update,) = plan.updates
    assert update.advantages == pytest.approx((1.0, -1.0, 0.0, 0.0), abs=1e-5)
    assert plan.reward_mean == pytest.approx(2.75)
    assert (plan.uniform_groups, plan.unscored) == (1, 0)


def test_a_penalty_is_taken_off_the_reward_before_advantages() -> None:
    groups = [held(0, [1.0, 0.0, None]), held(1, [5.0, 5.0])]
    plain = Algorithm(normalize_std=False)
    found = advantages_of(groups, plain, {"0.0.0": 0.5, "0.0.2": 9.0, "1.0.1": 2.0})
    assert found == {"0.0.0": 0.25, "0.0.1": -0.25, "0.0.2": 0.0, "1.0.0": 1.0, "1.0.1": -1.0}
    assert advantages_of(groups, plain) == {"0.0.0": 0.5, "0.0.1": -0.5, "0.0.2": 0.0, "1.0.0": 0.0, "1.0.1": 0.0}


def test_a_failed_score_is_left_out_and_moves_nobody() -> None:
    plan = plan_batch([held(0, [1.0, None, 0.0])], Algorithm(), Layout(), micro_batch_tokens=64)
    (update,) = plan.updates
    assert names(plan) == ["0.0.0", "0.0.2"]
    assert update.advantages == pytest.approx((1.0, -1.0), abs=1e-5)
    assert plan.unscored == 1 and plan.reward_mean == pytest.approx(0.5)
    assert sum(w * h.sampled for w, h in zip(update.weights, update.headers, strict=True)) == pytest.approx(1.0)


def test_nothing_scored_is_an_empty_update_for_every_rank() -> None:
    plan = plan_batch([held(0, [None, None])], Algorithm(), Layout(dp=2, ep=2), micro_batch_tokens=64)
    (update,) = plan.updates
    assert update.headers == () and update.packing.ranks == (((),), ((),))
    assert plan.reward_mean is None


def test_a_trajectory_without_a_sampled_token_is_left_out() -> None:
    t: Trajectory = trajectory(0, 0, 0)
    silent = dataclasses.replace(t, loss_mask=t.loss_mask & False)
    group = HeldGroup(
        ticket=Ticket(index=0, attempt=0),
        headers=(encode(silent)[0], encode(trajectory(0, 0, 1))[0]),
    )
    assert names(plan_batch([group], Algorithm(), Layout(), micro_batch_tokens=64)) == ["0.0.1"]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.tuples(st.none() | st.floats(0, 1), st.integers(2, 40)), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    ),
    updates=st.integers(1, 4),
    dp=st.integers(1, 3),
    kind=st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_every_trained_trajectory_is_in_one_update_and_weights_sum_to_one(
    groups: list[list[tuple[float | None, int]]], updates: int, dp: int, kind: str
) -> None:
    given_groups = [held(i, [r for r, _ in g], [n for _, n in g]) for i, g in enumerate(groups)]
    algorithm = Algorithm(updates_per_batch=updates, aggregation=kind)  # type: ignore[arg-type]
    plan = plan_batch(given_groups, algorithm, Layout(dp=dp), micro_batch_tokens=50)
    wanted = [h.identity.trajectory for g in given_groups for h in g.headers if "total" in h.rewards and h.sampled]
    assert names(plan) == wanted
    assert len(plan.updates) == min(updates, len(groups))
    for update in plan.updates:
        if update.headers:
            assert math.isclose(sum(w * h.sampled for w, h in zip(update.weights, update.headers, strict=True)), 1.0)
        assert sorted(i for d in range(dp) for i in update.of_rank(d)) == list(range(len(update.headers)))
    # A group is never torn apart: its advantages belong together.
    for update in plan.updates:
        others = {h.identity.index for u in plan.updates if u is not update for h in u.headers}
        assert not others & {h.identity.index for h in update.headers}


def test_split_evenly() -> None:
    assert [list(r) for r in split_evenly(5, 2)] == [[0, 1], [2, 3, 4]]
    assert split_evenly(2, 5) == [range(1), range(1, 2)]
    assert split_evenly(0, 3) == [range(0)]


def test_crossover_of_a_model() -> None:
    spec = tiny_spec()
    attention = spec.num_layers * spec.num_attention_heads * spec.head_dim
    assert crossover_length(spec) == spec.active_parameters() // attention
