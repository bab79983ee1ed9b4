"""Each way to break the contract is named by trajectory and field."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_asyncrl.data.trajectory import RoutingRun, SamplingMask, SamplingParams, Segment
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
    ("a mask of nothing truncated", {"sampling_mask": SamplingMask(np.zeros(N + 1, np.int64), np.zeros(0, np.int32))},
     "without each other"),
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


BESIDES: tuple[set[int], ...] = ({1001}, set(), {1002, 1003}, {1})
KEPT = [sorted({int(t), *more}) for t, more in zip(T.tokens[N // 2 :], BESIDES, strict=True)]
MASK = SamplingMask(
    indptr=np.array([0] * (N // 2 + 1) + [2, 3, 6, 8], np.int64), ids=np.concatenate(KEPT).astype(np.int32)
)
INSIDE = np.where(T.loss_mask, T.logprobs / 2, np.nan).astype(np.float32)
PARAMS = SamplingParams(temperature=0.7, top_p=0.9)
MASKED = dataclasses.replace(
    T,
    segments=(T.segments[0], msgspec.structs.replace(T.segments[1], sampling=PARAMS)),
    sampling_mask=MASK,
    support_logprobs=INSIDE,
)


def mask(*, indptr: np.ndarray | None = None, **ids: int) -> dict[str, SamplingMask]:
    """`MASK` with other offsets, or with other ids, by `i0`, `i1`, …"""
    found = MASK.ids.copy()
    for name, value in ids.items():
        found[int(name[1:])] = value
    return {"sampling_mask": SamplingMask(MASK.indptr if indptr is None else indptr, found)}


def segments_of(sampling: SamplingParams) -> dict[str, Any]:
    return {"segments": (T.segments[0], msgspec.structs.replace(T.segments[1], sampling=sampling))}


OUTSIDE = int(MASK.ids[2]) - 1
BROKEN_MASKS = [
    ("dropped", {"sampling_mask": None, "support_logprobs": None}, "token 4 .*: missing, though"),
    ("log-probabilities dropped", {"support_logprobs": None}, "nothing without each other"),
    ("another length", mask(indptr=MASK.indptr[:-1]), r"expected int64 \[9\]"),
    ("offsets that fall", mask(indptr=np.array([0, 0, 0, 0, 0, 3, 2, 6, 8], np.int64)), "never fall"),
    ("offsets past the ids", mask(indptr=np.array([0, 0, 0, 0, 0, 2, 3, 6, 9], np.int64)), "end at the number of ids"),
    ("shifted by one token", mask(indptr=np.array([0, 0, 0, 0, 2, 3, 6, 8, 8], np.int64)), "token 3 .*needs not"),
    ("one token's dropped", mask(indptr=np.array([0, 0, 0, 0, 0, 2, 2, 6, 8], np.int64)), "token 5 .*no mask, though"),
    ("a token outside", mask(i2=OUTSIDE), rf"token 5 \(id {OUTSIDE + 1}\): was sampled outside its mask"),
    ("unsorted ids", mask(i4=1003, i5=1002), "token 6 .*do not rise"),
    ("an id twice", mask(i5=1002), "token 6 .*stands twice"),
    ("an id below 0", mask(i6=-1), "token 7 .*id -1"),
    ("an id of no token", mask(i5=1010), "token 6 .*id 1010, the vocabulary 1010 tokens"),
    ("a mask of a whole vocabulary", segments_of(SamplingParams(temperature=0.7)), "token 4 .*needs not"),
    ("sampled greedily", segments_of(SamplingParams(temperature=0.0, top_p=0.9)), "temperature 0, it must be above 0"),
    ("no number inside", {"support_logprobs": changed(INSIDE, 5, np.nan)}, "token 5: must be a number"),
    ("a number outside", {"support_logprobs": changed(INSIDE, 1, -1.0)}, "token 1: must be a number"),
    ("inside below the whole", {"support_logprobs": changed(INSIDE, 6, -9.0)}, "token 6: -9 must lie"),
    ("inside above 0", {"support_logprobs": changed(INSIDE, 6, 0.5)}, "token 6: 0.5 must lie"),
]  # fmt: skip


def test_a_trajectory_with_masks_is_whole() -> None:
    validate(MASKED, num_experts=8, vocabulary=1010)


@pytest.mark.parametrize(("change", "message"), [b[1:] for b in BROKEN_MASKS], ids=[b[0] for b in BROKEN_MASKS])
def test_a_broken_mask_is_named_with_its_trajectory_and_token(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractViolation, match=rf"trajectory 0\.0\.0: (sampling_mask|support_logprobs): .*{message}"):
        validate(dataclasses.replace(MASKED, **change), num_experts=8, vocabulary=1010)
