"""A completion becomes a trajectory: pure, and strict about what is known of each token and each routing row.

Routing row i belongs to input position i: it is computed in the forward pass that reads token i, the pass that samples
token i + 1. With P prompt tokens and n sampled ones (T = P + n):

| rows | source | version |
|---|---|---|
| [0, cached) | `cached` | the version that the request was sent under: prefixes are kept apart by it |
| [cached, P) | `prefilled` | that of the first sampled token |
| [P, T-1) | `sampled` | that of token i + 1 |

An engine with our plugin says itself what each row is of (`Completion.row_runs`): which weights wrote it, also in the
cache, and rows that were recorded at sampling stay after a retraction. The table is for one that does not say. There
two things blur it, and then the version is -1 (not known) rather than a guess:
- The weights changed between submission and the first sampled token. The prompt may have been read in two chunks, one
  before and one after the change, and a prefix written by then may be of either; only row P - 1 is surely of the
  first token's pass.
- The engine threw the request out and read it again (a retraction). Rows may then come from the second reading; they
  are `prefilled`, and where the token's version is not the newest one the row's version is not known.

Rows that the engine did not return are `missing`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.trajectory import (
    Identity,
    PolicyAsked,
    RoutingRun,
    SamplingMask,
    SamplingParams,
    ScorerReport,
    Segment,
    Trajectory,
)
from moe_asyncrl.engine.completion import Completion
from moe_asyncrl.replay.encoding import CACHED, MISSING, PREFILLED, SAMPLED, expand, runs_of


def assemble(
    prompt: npt.NDArray[np.int32],
    completion: Completion,
    *,
    identity: Identity,
    sampling: SamplingParams,
    rewards: Mapping[str, float],
    score_status: Mapping[str, ScorerReport],
    metadata: Mapping[str, str],
) -> Trajectory:
    """The trajectory of prompt int32 [P] and its completion of n >= 1 tokens.

    The identity's engine, times and finish reason are those of the completion.

    Raises ValueError if the completion is empty, or of another prompt's length, or has more routing rows than tokens.
    """
    p, n = len(prompt), len(completion.output_ids)
    if n == 0 or completion.prompt_tokens != p:
        raise ValueError(
            f"completion {completion.rid}: {n} tokens after {completion.prompt_tokens}, the prompt has {p}"
        )
    tokens = np.concatenate((prompt, completion.output_ids), dtype=np.int32, casting="same_kind")
    loss_mask = np.zeros(p + n, dtype=np.bool_)
    loss_mask[p:] = True
    logprobs = np.full(p + n, np.nan, dtype=np.float32)
    logprobs[p:] = completion.logprobs
    versions = np.full(p + n, -1, dtype=np.int32)
    versions[p:] = completion.versions
    experts, runs = routing_rows(completion, p)
    mask, support = mask_rows(completion, p)
    return Trajectory(
        identity=Identity(
            trajectory=identity.trajectory,
            prompt=identity.prompt,
            index=identity.index,
            attempt=identity.attempt,
            sample=identity.sample,
            episode=identity.episode,
            engine=completion.engine,
            epoch=identity.epoch,
            finish_reason=completion.finish_reason,
            submitted=completion.submitted,
            finished=completion.finished,
        ),
        policy=PolicyAsked(base_version=completion.asked_version),
        segments=(
            Segment(start=0, end=p, role="user"),
            Segment(start=p, end=p + n, role="policy", sampling=sampling),
        ),
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        weight_version=versions,
        support_logprobs=support,
        sampling_mask=mask,
        routing_experts=experts,
        routing_runs=runs,
        rewards=dict(rewards),
        score_status=dict(score_status),
        metadata=dict(metadata),
    )


def mask_rows(c: Completion, p: int) -> tuple[SamplingMask | None, npt.NDArray[np.float32] | None]:
    """(kept ids, log-probabilities among them float32 [T]) after p prompt tokens; None where nothing was truncated."""
    if c.mask is None or c.support_logprobs is None:
        return None, None
    indptr = np.concatenate((np.zeros(p, dtype=np.int64), c.mask.indptr))
    support = np.full(p + len(c.output_ids), np.nan, dtype=np.float32)
    support[p:] = c.support_logprobs
    return SamplingMask(indptr=indptr, ids=c.mask.ids), support


def routing_rows(
    c: Completion, p: int
) -> tuple[npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None, tuple[RoutingRun, ...]]:
    """(experts [T-1, L, K], runs) of a completion after p prompt tokens; (None, ()) where the engine routes nothing.

    Raises ValueError if rows are left out at the front, or there are more than tokens.
    """
    if c.experts is None:
        return None, ()
    rows, given = p + len(c.output_ids) - 1, c.experts.shape[0]
    if given > rows or c.rows_from:
        raise ValueError(f"completion {c.rid}: {given} routing rows for {rows + 1} tokens, from row {c.rows_from}")
    experts = c.experts
    if given < rows:  # what stands in a missing row is never read; it is no valid expert of most models, least of all 0
        fill = np.full((rows - given, *experts.shape[1:]), np.iinfo(experts.dtype).max, dtype=experts.dtype)
        experts = np.concatenate((experts, fill))
    version, source = np.full(rows, -1, dtype=np.int32), np.full(rows, MISSING, dtype=np.int8)
    version[:given], source[:given] = expand(row_runs(c, p))
    return experts, runs_of(version, source)


def row_runs(c: Completion, p: int) -> tuple[RoutingRun, ...]:
    """Version and source of the rows that a completion after p prompt tokens has, from row `rows_from` on.

    By the engine's own record, else by the table above.
    """
    if c.row_runs is not None or c.experts is None:
        return c.row_runs or ()
    source, version = provenance(
        c.versions, p, cached=c.cached_tokens, asked=c.asked_version, retractions=c.retractions
    )
    part = slice(c.rows_from, c.rows_from + len(c.experts))
    return runs_of(version[part], source[part], start=c.rows_from)


def provenance(
    versions: npt.NDArray[np.int32], p: int, *, cached: int, asked: int, retractions: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """(number in SOURCES int8 [T-1], version int32 [T-1]) of each row, by the table above.

    `versions` int32 [n] of the sampled tokens.
    """
    n = len(versions)
    source = np.full(p + n - 1, SAMPLED, dtype=np.int8)
    version = np.empty(p + n - 1, dtype=np.int32)
    source[:p] = PREFILLED
    source[: min(cached, p - 1)] = CACHED  # the last prompt token is always read: it samples the first new one
    first, last = int(versions[0]), int(versions[-1])
    version[: p - 1] = first if first == asked else -1
    version[p - 1 :] = versions
    if retractions:
        source[p : p + n - 2] = PREFILLED
        if last != asked:
            version[: p - 1] = -1
        version[p - 1 :][versions != last] = -1
    return source, version
