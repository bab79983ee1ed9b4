"""Loss and gradients under every layout equal those of one process, on packed micro-batches of uneven lengths."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from tests.pool.pool import WorkerPool
from tests.train.parity_jobs import SPLITTABLE, tiny_spec
from tests.train.sharded import assemble, over_vocabulary, relative

TOLERANCE = 1e-5
PLANTED = 100 * TOLERANCE

Outcome = tuple[float, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def run(pool: WorkerPool) -> Any:
    """Loss and whole gradients of a spec under a layout, each computed once."""

    @cache
    def loss_and_gradients(spec: ModelSpec, layout: Layout, **options: Any) -> Outcome:
        answers = pool.run("tests.train.parity_jobs:loss_and_gradients", layout=layout, spec=spec, **options)
        (loss,) = {loss for loss, _ in answers if loss == loss}
        wholes = assemble([parts for _, parts in answers])
        for name, whole in wholes.items():
            if over_vocabulary(name):  # rows that pad the vocabulary take no part
                assert not whole[spec.vocab_size :].any(), name
                wholes[name] = whole[: spec.vocab_size]
        return loss, wholes

    return loss_and_gradients


def deviation(outcome: Outcome, reference: Outcome) -> tuple[float, float]:
    """Relative deviation of the loss, and the worst one of a gradient."""
    (loss, found), (reference_loss, expected) = outcome, reference
    assert found.keys() == expected.keys()
    worst = max(relative(found[name], expected[name]) for name in expected)
    return abs(loss - reference_loss) / abs(reference_loss), worst


LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(dp=2, ep=2, pp=2),
    Layout(tp=2),
    Layout(tp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(tp=2, pp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_equals_one_process(layout: Layout, run: Any) -> None:
    loss, gradient = deviation(run(tiny_spec(), layout), run(tiny_spec(), Layout()))
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, ep=2)], ids=str)
def test_context_parallelism_equals_one_process(layout: Layout, run: Any) -> None:
    outcome, reference = (run(tiny_spec(), which, lengths=SPLITTABLE) for which in (layout, Layout()))
    loss, gradient = deviation(outcome, reference)
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, ep=2), Layout(tp=2)], ids=str)
@pytest.mark.parametrize("plant", ["swap_experts", "transpose_projection"])
def test_a_planted_error_is_seen(plant: str, layout: Layout, run: Any) -> None:
    loss, gradient = deviation(run(tiny_spec(), layout, plant=plant), run(tiny_spec(), Layout()))
    assert loss > PLANTED
    assert gradient > PLANTED


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_nothing(recompute: str, run: Any) -> None:
    loss, gradient = deviation(run(tiny_spec(), Layout(), recompute=recompute), run(tiny_spec(), Layout()))
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


def test_tied_embeddings_on_two_stages_equal_one_process(run: Any) -> None:
    spec = tiny_spec(tie_embeddings=True)
    loss, gradient = deviation(run(spec, Layout(pp=2)), run(spec, Layout()))
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


def test_a_dense_model_on_tensor_and_pipeline_ranks_equals_one_process(run: Any) -> None:
    dense = {"family": "qwen3", "num_experts": 0, "experts_per_token": 0, "moe_intermediate_size": 0}
    spec = tiny_spec(**dense, moe_layers=(False,) * 4, attention_bias=True)
    loss, gradient = deviation(run(spec, Layout(tp=2, pp=2)), run(spec, Layout()))
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


def test_the_comparison_has_something_to_see(run: Any, pool: WorkerPool) -> None:
    """Logits spread by more than 1, and every tensor has a gradient."""
    (spread,) = pool.run("tests.train.parity_jobs:logit_spread", spec=tiny_spec())
    assert spread > 1
    _, gradients = run(tiny_spec(), Layout())
    assert all(whole.abs().max() > 1e-6 for whole in gradients.values())
