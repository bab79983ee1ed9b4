"""Layouts that the trainer refuses, each with the sizes that do not go together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_asyncrl.config.recipe import Trainer
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.trainable import check_trainable
from tests.models.test_shards import small_spec

DENSE: dict[str, Any] = {"moe_layers": (False, False), "num_experts": 0, "moe_intermediate_size": 0}


@pytest.mark.parametrize(
    ("changes", "trainer", "message"),
    [
        ({}, Trainer(pp=3), "2 layers do not split evenly over 3"),
        ({"num_experts": 9}, Trainer(dp=2, ep=2, etp=1), "9 experts do not split"),
        ({}, Trainer(tp=4), "attention heads 6 is not a multiple of tp 4"),
        ({"num_attention_heads": 8}, Trainer(tp=4), "key/value heads 2 is not a multiple of tp 4"),
        ({"hidden_size": 33}, Trainer(tp=2), "hidden_size 33 is not a multiple of tp 2"),
        ({"intermediate_size": 33}, Trainer(tp=2), "intermediate_size 33 is not a multiple of tp 2"),
        ({"moe_intermediate_size": 33}, Trainer(tp=2), "moe_intermediate_size 33 is not a multiple of etp 2"),
        (DENSE, Trainer(dp=2, ep=2, etp=1), "has no experts; use ep 1"),
        ({"mtp_layers": 1, "mtp": "keep"}, Trainer(), "does not carry multi-token-prediction layers yet; say `drop`"),
        ({}, Trainer(pp=2, stage_layers=(1, 2)), "stage_layers has 3 layers, the model 2"),
    ],
)
def test_a_layout_that_cannot_be_trained_is_refused(changes: dict[str, Any], trainer: Trainer, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(dataclasses.replace(small_spec(), **changes), Layout.of(trainer))


def test_context_parallelism_can_be_trained() -> None:
    check_trainable(small_spec(), Layout(cp=2))


def test_expert_tensor_parallelism_follows_tp_unless_given() -> None:
    assert Layout.of(Trainer(tp=2)).etp == 2
    assert Layout.of(Trainer(tp=2, ep=2, etp=1)).etp == 1
