"""The reference model: whose log-probabilities they are, what its pass leaves behind, and the KL on every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.train.batch import Sample
from tests.pool.pool import WorkerPool
from tests.train.sharded import assemble
from tests.train.step_jobs import deviation
from tests.train.test_step import gradients, plain

TOLERANCE = 1e-5
JOBS = "tests.train.reference_jobs:"
LAYOUTS = [Layout(dp=2, ep=2), Layout(pp=2), Layout(tp=2), Layout(cp=2), Layout(pp=2, dp=2, ep=2)]

Loss = tuple[float, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def with_kl(pool: WorkerPool) -> Loss:
    return plain(pool, replay=True, kl="k3")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradients_with_the_kl_are_those_of_one_process(
    pool: WorkerPool, with_kl: Loss, layout: Layout
) -> None:
    sums, found = gradients(pool, layout, replay=True, kl="k3")
    assert sums["loss"] == pytest.approx(with_kl[0], rel=TOLERANCE)
    assert deviation(found, with_kl[1]) < TOLERANCE
    assert sums["reference_tokens"] == sums["tokens"] and sums["kl_reference"] > 0.1 * sums["tokens"]


@pytest.mark.parametrize("kl", ["k1", "k2"])
def test_the_other_estimators(pool: WorkerPool, kl: str) -> None:
    loss, wanted = plain(pool, kl=kl)
    sums, found = gradients(pool, Layout(dp=2, ep=2), kl=kl)
    # With k1 the two parts of the loss, each of a size of about 0.1, nearly cancel here.
    assert sums["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=0.1 * TOLERANCE)
    assert deviation(found, wanted) < TOLERANCE


@pytest.mark.parametrize(
    "plant", [{"reference": "swap_experts"}, {"reference_mode": "off"}], ids=["other weights", "live routing"]
)
def test_a_wrong_reference_is_seen(pool: WorkerPool, with_kl: Loss, plant: dict[str, str]) -> None:
    sums, found = gradients(pool, Layout(dp=2, ep=2), replay=True, kl="k3", **plant)
    assert abs(sums["loss"] - with_kl[0]) > 100 * TOLERANCE * abs(with_kl[0])
    assert deviation(found, with_kl[1]) > 100 * TOLERANCE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("reference")
    for seed, name in ((0, "policy"), (1, "reference")):
        make_tiny_model(folder / name, "qwen3_moe", seed, init_std=None, alphabet="ascii", num_hidden_layers=2)
    return folder / "policy", folder / "reference"


def questions() -> list[Sample]:
    draw = np.random.default_rng(7)
    made = []
    for i in range(9):
        tokens = draw.integers(0, 64, int(draw.integers(2, 30))).astype(np.int32)
        made.append(Sample(name=f"q{i}", tokens=tokens, trained=np.arange(len(tokens)) > 0))
    return made


@pytest.fixture(scope="module")
def by_transformers(models: tuple[Path, Path]) -> list[list[np.ndarray]]:
    """Log-probabilities at temperature 0.8 under the policy and under the reference."""
    from transformers import AutoModelForCausalLM

    found = []
    for path in models:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        each = []
        with torch.no_grad():
            for s in questions():
                ids = torch.from_numpy(s.tokens.astype(np.int64))
                logp = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
                each.append(logp.gather(1, ids[1:, None])[:, 0].numpy())
        found.append(each)
    return found


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=str)
def test_the_references_logprobs_are_those_of_transformers(
    pool: WorkerPool, models: tuple[Path, Path], by_transformers: list[list[np.ndarray]], layout: Layout
) -> None:
    policy, reference = models
    common = {"policy": str(policy), "reference": str(reference), "given": questions()}
    before, inside, after = pool.run(JOBS + "scored_by_reference", layout=layout, **common)[0]

    def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
        return max(float(np.abs(a[1:] - b).max()) for a, b in zip(ours, theirs, strict=True))

    assert worst(before, by_transformers[0]) < 1e-4
    assert worst(inside, by_transformers[1]) < 1e-4
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))
    assert worst(inside, by_transformers[0]) > 100 * 1e-4, "the two models differ"


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_the_reference_pass_leaves_no_trace(pool: WorkerPool, bf16: bool) -> None:
    """Weights, gradients and optimizer are bit for bit as before, and so is the next update."""
    layout = Layout(pp=2, dp=2, ep=2)
    with_pass, without = (
        pool.run(JOBS + "there_and_back", layout=layout, swap=swap, bf16=bf16) for swap in (True, False)
    )
    for (ours, log, same), (theirs, other_log, _) in zip(with_pass, without, strict=True):
        assert same, "the block changed the weights, and its end gave every bit back"
        assert log == other_log
        assert all(torch.equal(a.value, b.value) for a, b in zip(ours, theirs, strict=True))
    assert assemble([parts for parts, _, _ in with_pass], tolerance=math.inf)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_trajectorys_kl_is_the_sum_over_its_trained_tokens(pool: WorkerPool, estimator: str) -> None:
    (tokens,) = pool.run(JOBS + "plain_kl", layout=Layout())
    formulas: dict[str, Any] = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }
    wanted = {name: sum(formulas[estimator](x) for x in each) for name, each in tokens.items()}
    scale = max(abs(v) for v in wanted.values())
    for layout in LAYOUTS if estimator == "k3" else [Layout()]:
        for found in pool.run(JOBS + "kl_of_trajectories", layout=layout, estimator=estimator):
            assert found.keys() == wanted.keys()
            assert max(abs(found[n] - wanted[n]) for n in wanted) < TOLERANCE * scale
    (planted,) = pool.run(JOBS + "kl_of_trajectories", layout=Layout(), estimator=estimator, plant="swap_experts")
    assert max(abs(planted[n] - wanted[n]) for n in wanted) > 100 * TOLERANCE * scale
