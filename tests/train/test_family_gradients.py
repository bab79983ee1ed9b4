"""Gradients of what only some families have are those of one process under every kind of parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_asyncrl.models.features import GluSpec, MlaSpec, RouterSpec, Yarn
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from tests.pool.pool import WorkerPool
from tests.train.parity_jobs import tiny_spec
from tests.train.sharded import assemble, over_vocabulary, relative

TOLERANCE = 1e-5
SIGMOID = RouterSpec(scores="sigmoid", expert_bias=True, scale=1.5)

FAMILIES: dict[str, ModelSpec] = {
    "glm4_moe": tiny_spec(
        family="glm4_moe", attention_bias=True, rotary_fraction=0.5, shared_expert_size=24, router=SIGMOID
    ),
    "deepseek_v3": tiny_spec(
        family="deepseek_v3",
        qk_norm=False,
        num_kv_heads=4,
        experts_per_token=4,
        router=RouterSpec(scores="sigmoid", expert_bias=True, groups=4, groups_per_token=2, scale=2.5),
        shared_expert_size=24,
        mla=MlaSpec(q_rank=20, kv_rank=12, nope_dim=10, rope_dim=6, value_dim=16),
        rope_scaling=Yarn(factor=4.0, original_context=16, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.5),
    ),
    "minimax_m2": tiny_spec(
        family="minimax_m2", qk_norm_over_heads=True, rotary_fraction=0.5, router=SIGMOID, moe_layers=(True,) * 4
    ),
    "gpt_oss": tiny_spec(
        family="gpt_oss",
        qk_norm=False,
        attention_bias=True,
        linear_biases=True,
        attention_sinks=True,
        sliding_window=4,
        windowed_layers=(True, False, True, False),
        moe_layers=(True,) * 4,
        glu=GluSpec(activation="quick_gelu", clamp=0.8, offset=1.0),
        rope_scaling=Yarn(factor=4.0, original_context=16, beta_fast=4.0, rounds_range=False),
    ),
}
LAYOUTS = [Layout(tp=2, ep=2), Layout(dp=2, ep=2, pp=2, stage_layers=(1, 3))]
SPLIT_EXPERTS = [Layout(tp=2), Layout(tp=2, dp=2, ep=2, etp=2)]
"""For the family whose experts have biases."""


def run(pool: WorkerPool, spec: ModelSpec, layout: Layout, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients."""
    answers = pool.run("tests.train.parity_jobs:loss_and_gradients", layout=layout, spec=spec, **options)
    (loss,) = {loss for loss, _ in answers if loss == loss}
    wholes = assemble([parts for _, parts in answers])
    return loss, {n: whole[: spec.vocab_size] if over_vocabulary(n) else whole for n, whole in wholes.items()}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_equal_one_process(family: str, pool: WorkerPool) -> None:
    spec = FAMILIES[family]
    loss, expected = run(pool, spec, Layout())
    for layout in LAYOUTS + (SPLIT_EXPERTS if spec.linear_biases else []):
        found_loss, found = run(pool, spec, layout)
        assert abs(found_loss - loss) < TOLERANCE * abs(loss), layout
        assert found.keys() == expected.keys()
        worst = max((relative(found[n], expected[n]), n) for n in expected if "expert_bias" not in n)
        assert worst[0] < TOLERANCE, (str(layout), worst)
    planted_loss, planted = run(pool, spec, LAYOUTS[0], plant="transpose_projection")
    assert max(relative(planted[n], expected[n]) for n in expected if "expert_bias" not in n) > 100 * TOLERANCE
    assert abs(planted_loss - loss) > 100 * TOLERANCE * abs(loss)
