"""Checks that a trajectory keeps the contract. Run where one is made and where one arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moe_asyncrl.data.trajectory import RoutingRun, SamplingMask, Segment, Trajectory

SUPPORT_SLACK = 1e-2
"""Rounding that a log-probability inside a mask may show against that over the whole vocabulary, in nats."""


class ContractViolation(ValueError):
    """A trajectory breaks the contract; the message names the trajectory, the field and what was found."""


def validate(t: Trajectory, *, num_experts: int | None = None, vocabulary: int | None = None) -> None:
    """Raise `ContractViolation` unless every field of `t` fits its tokens.

    `num_experts` bounds the expert ids and `vocabulary` those in sampling masks; without them only shapes and types
    are checked.
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
    check_mask(
        t.identity.trajectory,
        t.tokens,
        t.loss_mask,
        t.logprobs,
        t.segments,
        t.sampling_mask,
        t.support_logprobs,
        vocabulary=vocabulary,
    )
    for name, value in t.rewards.items():
        if not np.isfinite(value):
            fail(f"rewards.{name}", f"not finite: {value}")


def check_mask(
    name: str,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    logprobs: np.ndarray,
    segments: Sequence[Segment],
    mask: SamplingMask | None,
    support_logprobs: np.ndarray | None,
    *,
    vocabulary: int | None = None,
) -> None:
    """Raise `ContractViolation` unless exactly the tokens sampled with truncation have kept ids and a log-probability.

    Kept ids must rise, lie in the vocabulary, and have the token among them. The other arrays are those of the
    trajectory `name`, [T] each, already checked.
    """

    def fail(why: str, at: int | None = None) -> None:
        where = "" if at is None else f"token {at} (id {tokens[at]}): "
        raise ContractViolation(f"trajectory {name}: sampling_mask: {where}{why}")

    n = len(tokens)
    truncated = np.zeros(n, dtype=bool)
    for s in segments:
        if s.sampling is None:
            continue
        truncated[s.start : s.end] = s.sampling.truncates
        if s.sampling.temperature <= 0 and loss_mask[s.start : s.end].any():
            fail(
                f"cannot be trained on: sampled at temperature {s.sampling.temperature:g}, it must be above 0", s.start
            )
    truncated &= loss_mask
    if mask is None or support_logprobs is None:
        if mask is not None or support_logprobs is not None:
            fail("the mask and the log-probabilities inside it say nothing without each other")
        if truncated.any():
            fail("missing, though its sampling was truncated", int(truncated.argmax()))
        return
    if mask.indptr.dtype != np.int64 or mask.indptr.shape != (n + 1,) or mask.ids.dtype != np.int32:
        fail(f"expected int64 [{n + 1}] and int32, found {_kind(mask.indptr)} and {_kind(mask.ids)}")
    counts = np.diff(mask.indptr)
    if mask.indptr[0] != 0 or (counts < 0).any() or mask.ids.shape != (int(mask.indptr[-1]),):
        fail(f"offsets must start at 0, never fall and end at the number of ids, {mask.ids.shape}")
    if ((counts > 0) != truncated).any():
        at = int(((counts > 0) != truncated).argmax())
        fail("has no mask, though its sampling was truncated" if truncated[at] else "has a mask it needs not", at)
    of = np.repeat(np.arange(n), counts)
    step = np.diff(mask.ids)
    wrong = (of[1:] == of[:-1]) & (step <= 0)
    if wrong.any():
        at = int(wrong.argmax())
        fail("an id stands twice in its mask" if step[at] == 0 else "the ids of its mask do not rise", int(of[at]))
    beyond = (mask.ids < 0) | (mask.ids >= (np.iinfo(np.int32).max if vocabulary is None else vocabulary))
    if beyond.any():
        at = int(beyond.argmax())
        fail(f"its mask has id {mask.ids[at]}, the vocabulary {vocabulary} tokens", int(of[at]))
    inside = np.zeros(n, dtype=bool)
    inside[of[mask.ids == tokens[of]]] = True
    if (truncated & ~inside).any():
        fail("was sampled outside its mask", int((truncated & ~inside).argmax()))
    _check_support(name, logprobs, support_logprobs, truncated)


def _check_support(name: str, logprobs: np.ndarray, support: np.ndarray, truncated: np.ndarray) -> None:
    if (np.isnan(support) == truncated).any():
        at = int((np.isnan(support) == truncated).argmax())
        raise ContractViolation(
            f"trajectory {name}: support_logprobs: token {at}: must be a number exactly where there is a mask"
        )
    low, high = logprobs[truncated] - SUPPORT_SLACK, SUPPORT_SLACK
    off = (support[truncated] < low) | (support[truncated] > high)
    if off.any():
        at = int(np.flatnonzero(truncated)[off.argmax()])
        raise ContractViolation(
            f"trajectory {name}: support_logprobs: token {at}: {support[at]:g} must lie between {logprobs[at]:g}, "
            "that over the whole vocabulary, and 0"
        )


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


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
