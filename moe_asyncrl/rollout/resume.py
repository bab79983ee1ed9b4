"""A completion that an engine cut off goes on: what was sampled is kept and sent again as part of the prompt. Pure.

Every token keeps the log-probability, the version, the kept ids and the routing row that were recorded when it was
sampled, though the second request reads it again, maybe with other weights. A part that was aborted while it waited for
its turn after a retraction has tokens without rows: the next request brings them, marked as what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.digest import Experts
from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.replay.log import Reading, RoutingLog
from moe_asyncrl.rollout.assemble import row_runs


def may_go_on(request: GenerateRequest, done: Completion) -> bool:
    """True for a completion that was aborted before its last token; without any token yet, it is asked for anew."""
    return done.finish_reason == "abort" and len(done.output_ids) < request.sampling.max_new_tokens


def log_of(prompt: npt.NDArray[np.int32], done: Completion) -> RoutingLog | None:
    """The rows of a completion from row 0 on; None where nothing was routed."""
    return None if done.experts is None else RoutingLog.of(reading_of(prompt, done))


def reading_of(prompt: npt.NDArray[np.int32], done: Completion) -> Reading:
    """What a request for `prompt` int32 [P] brought. Raises ValueError without rows."""
    if done.experts is None:
        raise ValueError(f"completion {done.rid} has no routing rows")
    tokens = np.concatenate((prompt, done.output_ids), dtype=np.int32, casting="same_kind")
    return Reading(tokens, done.rows_from, done.experts, row_runs(done, len(prompt)))


def continuation(request: GenerateRequest, done: Completion, attempt: int) -> GenerateRequest:
    """The request that goes on where `done` was cut off; only rows that are not there yet are asked for."""
    prompt = np.asarray(request.input_ids, dtype=np.int32)
    tokens = np.concatenate((prompt, done.output_ids), dtype=np.int32)
    log = log_of(prompt, done)
    left = request.sampling.max_new_tokens - len(done.output_ids)
    return dataclasses.replace(
        request,
        rid=f"{request.rid}+{attempt}",
        input_ids=tokens,
        sampling=msgspec.structs.replace(request.sampling, max_new_tokens=left),
        rows_from=0 if log is None else log.rows_from(tokens),
    )


def joined(request: GenerateRequest, first: Completion, second: Completion) -> Completion:
    """One completion of `request` from its first part and that of `continuation(request, first, …)`.

    Raises ValueError if the second one does not follow the first.
    """
    prompt = np.asarray(request.input_ids, dtype=np.int32)
    so_far = np.concatenate((prompt, first.output_ids), dtype=np.int32)
    if second.prompt_tokens != len(so_far):
        raise ValueError(f"{second.rid} read {second.prompt_tokens} tokens, {first.rid} ended after {len(so_far)}")
    experts, runs = first.experts, first.row_runs
    if len(second.output_ids) and first.experts is not None:
        rest = _without_rows(so_far, second, first.experts) if second.experts is None else reading_of(so_far, second)
        log = RoutingLog.of(reading_of(prompt, first)).extended(rest)
        experts, runs = log.experts, log.runs
    elif second.experts is not None:  # the first part waited when it was aborted: all rows are of the second reading
        log = RoutingLog.of(reading_of(so_far, second))
        experts, runs = log.experts, log.runs
    return dataclasses.replace(
        first,
        engine=second.engine,
        output_ids=np.concatenate((first.output_ids, second.output_ids)),
        logprobs=np.concatenate((first.logprobs, second.logprobs)),
        versions=np.concatenate((first.versions, second.versions)),
        experts=experts,
        row_runs=runs,
        mask=_masks([first.mask, second.mask]),
        support_logprobs=_arrays([first.support_logprobs, second.support_logprobs]),
        finish_reason=second.finish_reason,
        finish_detail=second.finish_detail,
        retractions=first.retractions + second.retractions,
        finished=second.finished,
    )


def _without_rows(prompt: npt.NDArray[np.int32], done: Completion, like: Experts) -> Reading:
    """Of a request that waited, after a retraction, when it was aborted: tokens, and no row of them."""
    tokens = np.concatenate((prompt, done.output_ids), dtype=np.int32)
    return Reading(tokens, done.rows_from, like[:0], ())


def _arrays(parts: Sequence[npt.NDArray[np.float32] | None]) -> npt.NDArray[np.float32] | None:
    given = [p for p in parts if p is not None]
    return np.concatenate(given) if len(given) == len(parts) else None


def _masks(parts: Sequence[SamplingMask | None]) -> SamplingMask | None:
    given = [p for p in parts if p is not None]
    if len(given) != len(parts):
        return None
    counts = np.concatenate([np.diff(p.indptr) for p in given])
    indptr = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    return SamplingMask(indptr=indptr, ids=np.concatenate([p.ids for p in given]))
