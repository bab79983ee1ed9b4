"""Checks that a trajectory keeps the contract. Run where one is made and where one arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moe_asyncrl.data.trajectory import RoutingRun, Trajectory


class ContractViolation(ValueError):
    """A trajectory breaks the contract; the message names the trajectory, the field and what was found."""


def validate(t: Trajectory, *, num_experts: int | None = None) -> None:
    """Raise `ContractViolation` unless every field of `t` fits its tokens.

    `num_experts` bounds the expert ids; without it only shapes and types are checked.
    """
    n = t.length

    def fail(field: str, why: str) -> None:
        raise ContractViolation(f"trajectory {t.identity.trajectory}: {field}: {why}")

    def expect(field: str, array: np.ndarray | None, dtype: str, shape: tuple[int, ...]) -> None:
        if array is None:
            return
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            fail(field, f"expected {dtype} {list(shape)}, found {array.dtype} {list(array.shape)}")

    if n < 1:
        fail("tokens", "empty")
    expect("tokens", t.tokens, "int32", (n,))
    expect("loss_mask", t.loss_mask, "bool", (n,))
    expect("logprobs", t.logprobs, "float32", (n,))
    expect("weight_version", t.weight_version, "int32", (n,))
    expect("support_logprobs", t.support_logprobs, "float32", (n,))
    expect("teacher_logprobs", t.teacher_logprobs, "float32", (n,))
    sampled = t.loss_mask
    if sampled[0]:
        fail("loss_mask", "the first token cannot be sampled: nothing precedes it")
    if np.isnan(t.logprobs[sampled]).any():
        fail("logprobs", f"missing (NaN) for {int(np.isnan(t.logprobs[sampled]).sum())} sampled tokens")
    if (t.logprobs[sampled] > 1e-4).any():
        fail("logprobs", "a log-probability above 0")
    if not np.isnan(t.logprobs[~sampled]).all():
        fail("logprobs", "must be NaN where the policy did not sample")
    if (t.weight_version[sampled] < 0).any():
        fail("weight_version", "a sampled token has no version")
    if (t.weight_version[~sampled] != -1).any():
        fail("weight_version", "must be -1 where the policy did not sample")
    _check_segments(t, fail_on=fail)
    if t.routing_experts is not None:
        e = t.routing_experts
        if e.ndim != 3 or e.shape[0] != n - 1 or e.dtype not in (np.dtype("uint8"), np.dtype("uint16")):
            fail("routing.experts", f"expected uint8 or uint16 [{n - 1}, L, K], found {e.dtype} {list(e.shape)}")
        if not covers(t.routing_runs, n - 1):
            fail("routing.runs", f"must cover rows 0 to {n - 1} once, in order: {t.routing_runs}")
        known = known_rows(t.routing_runs, n - 1)
        if num_experts is not None and known.any() and int(e[known].max(initial=0)) >= num_experts:
            fail("routing.experts", f"expert {int(e[known].max())} of a model with {num_experts}")
    elif t.routing_runs:
        fail("routing.runs", "given without experts")
    m = t.sampling_mask
    if m is not None:
        expect("sampling_mask.indptr", m.indptr, "int64", (n + 1,))
        expect("sampling_mask.ids", m.ids, "int32", (int(m.indptr[-1]),))
        if m.indptr[0] != 0 or (np.diff(m.indptr) < 0).any():
            fail("sampling_mask.indptr", "must start at 0 and never fall")
    for name, value in t.rewards.items():
        if not np.isfinite(value):
            fail(f"rewards.{name}", f"not finite: {value}")


def covers(runs: tuple[RoutingRun, ...], rows: int) -> bool:
    """True if the runs cover rows [0, rows) once and in order."""
    at = 0
    for run in runs:
        if run.start != at or run.end <= run.start:
            return False
        at = run.end
    return at == rows


def known_rows(runs: Sequence[RoutingRun], rows: int) -> np.ndarray:
    """bool [rows]: true where the source is not `missing`."""
    known = np.zeros(rows, dtype=bool)
    for run in runs:
        known[run.start : run.end] = run.source != "missing"
    return known


def _check_segments(t: Trajectory, *, fail_on: Callable[[str, str], None]) -> None:
    at = 0
    policy = np.zeros(t.length, dtype=bool)
    for s in t.segments:
        if s.start != at or s.end < s.start:
            fail_on("segments", f"segment [{s.start}, {s.end}) does not follow token {at}")
        at = s.end
        policy[s.start : s.end] = s.role == "policy"
    if at != t.length:
        fail_on("segments", f"cover {at} of {t.length} tokens")
    if (t.loss_mask & ~policy).any():
        fail_on("loss_mask", "true outside the policy's segments")
