"""One update: log-probabilities over a spread vocabulary, AdamW, batches without a gradient, divergence, routers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_asyncrl.algorithms.entropy import entropy_from_logits
from moe_asyncrl.config.capability import Capabilities, adam_source
from moe_asyncrl.models.layout import Layout
from tests.pool.pool import WorkerFailed, WorkerPool
from tests.train.sharded import assemble
from tests.train.update_jobs import random_logits

JOBS = "tests.train.update_jobs"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_over_a_spread_vocabulary(pool: WorkerPool, temperature: float, dtype: str) -> None:
    logits, labels, weights = random_logits()
    exact = logits.to(getattr(torch, dtype)).double().requires_grad_()
    logp = (exact / temperature).log_softmax(-1)
    wanted = logp.gather(-1, labels[..., None])[..., 0]
    (wanted * weights.double()).sum().backward()
    assert exact.grad is not None
    for layout in (Layout(), Layout(tp=2)):
        answers = pool.run(f"{JOBS}:logprobs_and_entropy", layout=layout, temperature=temperature, dtype=dtype)
        for found, entropy, _ in answers:
            np.testing.assert_allclose(found, wanted.detach().numpy(), atol=5e-6)
            np.testing.assert_allclose(entropy, entropy_from_logits(exact.detach() / temperature).numpy(), atol=5e-6)
        gradient = np.concatenate([g for _, _, g in answers], axis=-1)
        np.testing.assert_allclose(gradient, exact.grad.numpy(), atol=1e-6 if dtype == "float32" else 2e-2)


def test_the_optimizer_is_adamw_with_clipping(pool: WorkerPool) -> None:
    ((ours, reference, norm),) = pool.run(f"{JOBS}:adam_against_torch", layout=Layout(), steps=4)
    assert norm > 0.5, "clipping was at work"
    for (name, a), (_, b) in zip(ours, reference, strict=True):
        assert np.abs(a - b).max() / np.abs(b).max() < 1e-6, name


def test_a_batch_without_a_trained_token_changes_nothing(pool: WorkerPool) -> None:
    for layout in (Layout(), Layout(dp=2, ep=2), Layout(tp=2), Layout(pp=2), Layout(cp=2, ep=2)):
        answers = pool.run(f"{JOBS}:empty_update", layout=layout)
        before, after = (assemble([a[i] for a in answers]) for i in (0, 1))
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert answers[0][2].tokens == 0 and answers[0][2].loss == 0.0


def test_a_loss_that_is_not_finite_stops_every_rank(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed) as caught:
        pool.run(f"{JOBS}:diverging", layout=Layout(dp=2, ep=2), where="loss")
    text = str(caught.value)
    assert text.count("TrainingDiverged: the loss is") == 2 and "did not answer" not in text


def test_routers_are_numbered_over_the_model_and_dense_layers_take_no_number(pool: WorkerPool) -> None:
    def found(layout: Layout, *moe: bool, plant: str | None = None) -> list[list[tuple[int, int]]]:
        return pool.run(f"{JOBS}:routers", layout=layout, moe_layers=moe, plant=plant)

    assert found(Layout(), False, True, False, True) == [[(0, 2), (1, 4)]]
    assert found(Layout(pp=2), False, True, True, True) == [[(0, 2)], [(1, 3), (2, 4)]]
    assert found(Layout(pp=2), False, False, True, True) == [[], [(0, 3), (1, 4)]]
    assert found(Layout(pp=2, vpp=2), False, True, True, True) == [[(1, 3)], [(0, 2), (2, 4)]]
    # A decoder that is never called gets no rows.
    assert found(Layout(), False, True, True, True, plant="second decoder") == [[(0, 2), (1, 3), (2, 4)]]
    with pytest.raises(WorkerFailed, match=r"UserError: layer 0: no router, config\.json says otherwise"):
        found(Layout(), False, False, True, True, plant="dense as moe")


def test_adam_comes_from_where_the_machine_says(pool: WorkerPool) -> None:
    (used,) = pool.run("moe_asyncrl.train.optimizer:adam_in_use", layout=Layout())
    assert used == adam_source(Capabilities())
