"""Each way to break the contract is named by trajectory and field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_asyncrl.data.trajectory import RoutingRun, SamplingMask, Segment
from moe_asyncrl.data.validate import ContractViolation, known_rows, validate
from tests.data.samples import trajectory

N = 8


def changed(array: np.ndarray, at: int, value: Any) -> np.ndarray:
    copy = np.array(array)
    copy[at] = value
    return copy


T = trajectory(tokens=N)
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("no tokens", {"tokens": np.zeros(0, np.int32)}, "tokens: empty"),
    ("tokens of another type", {"tokens": T.tokens.astype(np.int64)}, "tokens: expected int32"),
    ("a mask of another length", {"loss_mask": T.loss_mask[:-1]}, r"loss_mask: expected bool \[8\]"),
    ("a sampled first token", {"loss_mask": np.ones(N, bool)}, "first token cannot be sampled"),
    ("a sampled token without a log-probability", {"logprobs": changed(T.logprobs, -1, np.nan)}, "missing"),
    ("a log-probability above 0", {"logprobs": changed(T.logprobs, -1, 0.5)}, "above 0"),
    ("a log-probability of the prompt", {"logprobs": changed(T.logprobs, 0, -1.0)}, "must be NaN"),
    ("a sampled token without a version", {"weight_version": changed(T.weight_version, -1, -1)}, "has no version"),
    ("a version of the prompt", {"weight_version": changed(T.weight_version, 0, 3)}, "must be -1"),
    ("segments with a hole", {"segments": (Segment(start=1, end=N, role="policy"),)}, "does not follow"),
    ("segments too short", {"segments": (Segment(start=0, end=N - 1, role="policy"),)}, "cover 7 of 8"),
    ("sampled outside the policy", {"segments": (Segment(start=0, end=N, role="user"),)}, "outside the policy"),
    ("a row for the last token", {"routing_experts": np.zeros((N, 2, 2), np.uint8)}, r"\[7, L, K\]"),
    ("wide experts", {"routing_experts": np.zeros((N - 1, 2, 2), np.int32)}, "uint8 or uint16"),
    ("runs with a hole", {"routing_runs": (RoutingRun(start=1, end=7, version=0, source="sampled"),)}, "routing.runs"),
    ("runs too short", {"routing_runs": (RoutingRun(start=0, end=6, version=0, source="sampled"),)}, "routing.runs"),
    ("runs without rows", {"routing_experts": None}, "given without experts"),
    ("an expert that the model lacks", {"routing_experts": np.full((N - 1, 2, 2), 8, np.uint8)}, "expert 8"),
    ("a mask that falls", {"sampling_mask": SamplingMask(np.array([0, 2, 1, 1, 1, 1, 1, 1, 1]), np.zeros(1, np.int32))},
     "never fall"),
    ("a reward that is no number", {"rewards": {"total": float("nan")}}, r"rewards\.total: not finite"),
    ("a reward without bound", {"rewards": {"total": float("inf")}}, r"rewards\.total: not finite"),
]  # fmt: skip


def test_the_sample_itself_is_whole() -> None:
    validate(T, num_experts=8)


@pytest.mark.parametrize(("change", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_trajectory_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractViolation, match=rf"trajectory 0\.0\.0: .*{message}"):
        validate(dataclasses.replace(T, **change), num_experts=8)


def test_missing_rows_are_marked_and_their_zeros_are_not_read_as_expert_zero() -> None:
    runs = (
        RoutingRun(start=0, end=3, version=0, source="sampled"),
        RoutingRun(start=3, end=N - 1, version=-1, source="missing"),
    )
    experts = np.array(T.routing_experts)
    experts[3:] = 255
    validate(dataclasses.replace(T, routing_experts=experts, routing_runs=runs), num_experts=8)
    assert known_rows(runs, N - 1).tolist() == [True] * 3 + [False] * 4
