"""Both sides of the end-to-end benchmark are given the same work."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ours import SKIPPED_STEPS, recipe_changes
from benchmarks.peer_trl.process import MICRO_BATCH, THREADS, settings
from benchmarks.tasks import LENGTH_MAX, LENGTH_MEAN, TASKS, answer_lengths, beginning_with, prompt_lines
from moe_asyncrl.cluster.demo import recipe_path
from moe_asyncrl.config.load import load_recipe


def test_lengths_are_long_tailed_with_the_mean_that_is_claimed() -> None:
    lengths = answer_lengths(200_000, seed=3)
    assert lengths.min() >= 1 and lengths.max() == LENGTH_MAX
    # What the cap takes away: mean * (1 - Phi((ln(max) - mu - s^2) / s)) + max * P(longer), with s = 1.
    assert lengths.mean() == pytest.approx(LENGTH_MEAN, rel=0.06)
    assert np.median(lengths) == pytest.approx(LENGTH_MEAN * np.exp(-0.5), rel=0.02)
    assert np.array_equal(lengths, answer_lengths(200_000, seed=3))
    assert not np.array_equal(lengths, answer_lengths(200_000, seed=4))


def test_a_long_prompt_carries_its_length_and_a_short_one_none() -> None:
    long = [json.loads(line) for line in prompt_lines(TASKS["long"], seed=0)]
    assert [line["length"] for line in long] == answer_lengths(len(long), 0).tolist()
    assert len({line["prompt"] for line in long}) == len(long)
    assert all("length" not in json.loads(line) for line in prompt_lines(TASKS["short"], seed=0))


def test_our_run_measures_the_batches_that_the_peer_trains() -> None:
    """The peer goes on through the file; our run begins so much earlier as it has steps that do not count."""
    task = TASKS["long"]
    lines = prompt_lines(task, seed=0)
    for batch in (1, 4, 124):
        mine = beginning_with(lines, batch - SKIPPED_STEPS, task)
        assert sorted(mine) == sorted(lines)
        measured = mine[SKIPPED_STEPS * task.groups :][: task.groups]
        at = batch * task.groups
        assert measured == lines[at : at + task.groups]


@pytest.mark.parametrize("name", list(TASKS))
def test_one_recipe_and_one_set_of_settings_ask_for_the_same(name: str) -> None:
    task, place = TASKS[name], Path("m")
    changes = recipe_changes(task, model=place, prompts=place, runs=place, steps=5, seed=7)
    r = load_recipe(recipe_path("demo"), [*changes, "optimizer.lr=2e-4"])
    told = settings(task, model=place, prompts=place, output=place, lr=2e-4, seed=7)
    assert r.run.steps == 5 + SKIPPED_STEPS
    assert (r.rollout.groups_per_step, r.rollout.group_size) == (told["groups"], told["group_size"])
    assert r.rollout.max_new_tokens == told["max_new_tokens"]
    assert (r.optimizer.lr, r.run.seed, r.model.path) == (told["lr"], told["seed"], told["model"])
    assert r.rollout.max_new_tokens_field == ("length" if task.long_tailed else None)
    assert r.rollout.ignore_eos and not r.data.shuffle
    # The peer's micro-batches make up one batch, and both sides have as many threads to train with.
    assert task.groups * task.group_size % MICRO_BATCH[name] == 0
    assert r.trainer.dp * r.trainer.threads == THREADS
    # What train.py fixes for the peer.
    assert (r.algorithm.clip_low, r.algorithm.clip_high, r.algorithm.normalize_std) == (0.2, 0.28, False)
    assert (r.optimizer.weight_decay, r.optimizer.clip_grad, r.optimizer.schedule) == (0.0, 1.0, "constant")
    assert (r.algorithm.updates_per_batch, r.algorithm.aggregation) == (1, "token_mean")
