"""One request and one completion as values, and the strict reading of SGLang's reply.

Whatever does not fit its tokens (rows, log-probabilities, version spans, masks) is a `MalformedReply`; nothing is
padded.
"""

from __future__ import annotations

import binascii
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from moe_asyncrl.config.recipe import Rollout
from moe_asyncrl.data.trajectory import RoutingRun, SamplingMask, SamplingParams
from moe_asyncrl.engine.errors import MalformedReply
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.replay.encoding import NotRows, decode_rows

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Tokens in, tokens out.

    `version` is the committed policy version at submission: prefixes of other versions are not reused.
    """

    rid: str
    """Unique among running requests; names the request in an abort."""
    input_ids: Ids
    sampling: SamplingParams
    version: int
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end token."""
    ignore_eos: bool = False
    rows_from: int = 0
    """First routing row that is wanted; the earlier ones are known. At most the prompt's length."""


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's rows look like."""

    moe_layers: tuple[bool, ...]
    """For each decoder layer, whether it routes. A dense layer's row is dropped."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, spec: ModelSpec) -> RoutingShape | None:
        """The rows of an engine that serves `spec`; None for a dense model."""
        if not spec.is_moe:
            return None
        return cls(moe_layers=spec.moe_layers, top_k=spec.experts_per_token, num_experts=spec.num_experts)


def sampling_params(rollout: Rollout, max_new_tokens: int, vocabulary: int) -> SamplingParams:
    """How a recipe samples from the policy that it trains, a model of `vocabulary` tokens.

    SGLang returns a sampling mask only under a finite top-k, so top-p and min-p alone are sent with the vocabulary's
    size as top-k, which keeps every token.
    """
    r = rollout
    asked = SamplingParams(
        temperature=r.temperature,
        top_k=min(r.top_k, vocabulary),
        top_p=r.top_p,
        min_p=r.min_p,
        max_new_tokens=max_new_tokens,
    )
    return msgspec.structs.replace(asked, top_k=vocabulary) if asked.truncates and not asked.top_k else asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """n tokens that the engine sampled after a prompt of P tokens. L counts MoE layers only."""

    rid: str
    engine: str
    asked_version: int
    """The version that the request was sent under; its cached prefix was written by these weights"""
    prompt_tokens: int
    output_ids: npt.NDArray[np.int32]
    """int32 [n]"""
    logprobs: npt.NDArray[np.float32]
    """float32 [n]: full-vocabulary log-softmax at the sampling temperature"""
    versions: npt.NDArray[np.int32]
    """int32 [n]: the weights that sampled each token, by the engine's own spans; -1: its first, uncommitted weights"""
    experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None
    """[P + n - 1 - rows_from, L, K] logical expert ids in the engine's order; None if not asked for, if nothing was
    sampled, or for what was aborted while it waited"""
    rows_from: int = 0
    """The first of these rows"""
    row_runs: tuple[RoutingRun, ...] | None = None
    """Version and source of these rows by the engine's own record; None if it keeps none"""
    mask: SamplingMask | None
    """Token ids that truncation kept, over the n tokens; None if not asked for"""
    support_logprobs: npt.NDArray[np.float32] | None
    """float32 [n]: renormalised within the mask"""
    finish_reason: str
    """`stop` (an end token), `length`, or `abort`"""
    finish_detail: str
    cached_tokens: int
    """Prompt tokens whose keys and routing rows came from the prefix cache"""
    retractions: int
    """Times that the request was thrown out and prefilled again; rows of earlier tokens are then re-routed"""
    submitted: float
    finished: float
    """Unix seconds, by our clock"""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    message: str = ""


class _Meta(msgspec.Struct):
    id: str
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]]
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


def _waited(meta: _Meta) -> bool:
    """Whether this is the short reply for a request that was aborted while it waited: new, or after a retraction.

    SGLang then has the sampled tokens and their versions alone. Their rows are made by the resubmission.
    """
    return meta.finish_reason.type == "abort" and meta.prompt_tokens is None and meta.num_retractions is None


_DECODER = msgspec.json.Decoder(list[_Reply])


def request_body(requests: Sequence[GenerateRequest], *, experts: bool, mask: bool) -> bytes:
    """One `/generate` body for all requests. Raises ValueError for what the engine would take wrongly."""
    sampling = []
    for r in requests:
        s = r.sampling
        if len(r.input_ids) == 0:
            raise ValueError(f"request {r.rid}: empty prompt")
        if not 0 <= r.rows_from <= len(r.input_ids):
            raise ValueError(f"request {r.rid}: routing rows from {r.rows_from} of {len(r.input_ids)} prompt tokens")
        if mask and s.top_k <= 0:
            raise ValueError(f"request {r.rid}: a sampling mask needs a finite top_k")
        sampling.append(
            {
                "temperature": s.temperature,
                "top_k": s.top_k if s.top_k > 0 else -1,
                "top_p": s.top_p,
                "min_p": s.min_p,
                "max_new_tokens": s.max_new_tokens,
                "stop_token_ids": list(r.stop_token_ids) or None,
                "ignore_eos": r.ignore_eos,
            }
        )
    body: dict[str, Any] = {
        "rid": [r.rid for r in requests],
        "input_ids": [np.asarray(r.input_ids).tolist() for r in requests],
        "sampling_params": sampling,
        "extra_key": [str(r.version) for r in requests],
        "return_logprob": True,
        "return_routed_experts": experts,
        "routed_experts_start_len": _rows_from(requests),
    }
    if mask:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return msgspec.json.encode(body)


def _rows_from(requests: Sequence[GenerateRequest]) -> int:
    """The first row that one of the requests wants: SGLang takes one number for all of a list."""
    return min((r.rows_from for r in requests), default=0)


def parse_replies(
    body: bytes,
    requests: Sequence[GenerateRequest],
    *,
    engine: str,
    routing: RoutingShape | None,
    mask: bool,
    submitted: float,
    finished: float,
) -> list[Completion]:
    """Read the reply to `request_body` of the same requests.

    Raises MalformedReply with the engine, request and field.
    """
    try:
        replies = _DECODER.decode(body)
    except msgspec.MsgspecError as e:
        raise MalformedReply(f"{engine}: the reply to /generate is not what was asked for: {e}") from None
    if len(replies) != len(requests):
        raise MalformedReply(f"{engine}: {len(replies)} completions for {len(requests)} requests")
    start = _rows_from(requests)
    return [
        _completion(reply, request, engine, routing, mask, submitted, finished, start)
        for reply, request in zip(replies, requests, strict=True)
    ]


def _completion(
    reply: _Reply,
    request: GenerateRequest,
    engine: str,
    routing: RoutingShape | None,
    mask: bool,
    submitted: float,
    finished: float,
    start: int,
) -> Completion:
    meta, n = reply.meta_info, len(reply.output_ids)
    where = f"{engine}: request {request.rid}"
    if meta.id != request.rid:
        raise MalformedReply(f"{where}: the reply is for {meta.id}")
    prompt, waited = len(request.input_ids), _waited(meta)
    if waited:
        meta = msgspec.structs.replace(
            meta, prompt_tokens=prompt, cached_tokens=0, num_retractions=int(n > 0), routed_experts=None
        )
        if mask or meta.weight_versions is None:  # the kept ids are lost, and without them the tokens
            n, reply = 0, _Reply([], meta)
            meta.output_token_logprobs, meta.weight_versions = [], []
    for field in ("prompt_tokens", "cached_tokens", "num_retractions", "weight_versions"):
        if getattr(meta, field) is None:
            raise MalformedReply(f"{where}: the reply has no {field}")
    assert meta.cached_tokens is not None and meta.num_retractions is not None and meta.weight_versions is not None
    if meta.prompt_tokens != prompt:
        raise MalformedReply(f"{where}: {meta.prompt_tokens} prompt tokens, {prompt} were sent")
    ids = np.array(reply.output_ids, dtype=np.int32)
    pairs = meta.output_token_logprobs
    if [p[1] for p in pairs] != reply.output_ids:
        raise MalformedReply(
            f"{where}: output_token_logprobs are of other tokens than output_ids ({len(pairs)} and {n})"
        )
    logprobs = np.array([p[0] for p in pairs], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise MalformedReply(f"{where}: a log-probability is not finite")
    experts, runs = None, None
    if routing is not None and n and not waited:
        found = decode_experts(meta.routed_experts, prompt + n - 1, routing, where, start=start)
        first = request.rows_from - start
        experts = found.experts[first:]
        runs = None if found.runs is None else clipped(found.runs, request.rows_from)
    kept, support = _mask(meta, ids, where) if mask else (None, None)
    return Completion(
        rid=request.rid,
        engine=engine,
        asked_version=request.version,
        prompt_tokens=prompt,
        output_ids=ids,
        logprobs=logprobs,
        versions=versions_of([(s.version, s.start, s.end) for s in meta.weight_versions], n, where),
        experts=experts,
        rows_from=request.rows_from,
        row_runs=runs,
        mask=kept,
        support_logprobs=support,
        finish_reason=meta.finish_reason.type,
        finish_detail=meta.finish_reason.message,
        cached_tokens=meta.cached_tokens,
        retractions=meta.num_retractions,
        submitted=submitted,
        finished=finished,
    )


def versions_of(spans: Sequence[tuple[str, int, int]], n: int, where: str) -> npt.NDArray[np.int32]:
    """Spans (label, start, end) over n tokens → int32 [n]. They must cover every token exactly once, in order."""
    out = np.empty(n, dtype=np.int32)
    position = 0
    for label, start, end in spans:
        if start != position or end < start or end > n:
            raise MalformedReply(
                f"{where}: weight version {label!r} covers [{start}, {end}) after {position} of {n} tokens"
            )
        try:
            out[start:end] = int(label)
        except (ValueError, OverflowError):
            raise MalformedReply(f"{where}: weight version {label!r} is not a number") from None
        position = end
    if position != n:
        raise MalformedReply(f"{where}: the weight versions cover {position} of {n} tokens")
    return out


@dataclasses.dataclass(frozen=True)
class Rows:
    """What an engine says of the routing rows of one sequence, from its row `start` on."""

    start: int
    experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    """[rows, MoE layers, K]"""
    runs: tuple[RoutingRun, ...] | None


def decode_experts(encoded: str | None, rows: int, routing: RoutingShape, where: str, *, start: int = 0) -> Rows:
    """Base64 of one of the encodings of `replay/encoding.py`, for rows [start, rows), in the smallest type."""
    if encoded is None:
        raise MalformedReply(f"{where}: no routed_experts; was the server started with routing capture?")
    due = max(0, rows - start)
    try:
        found = decode_rows(
            binascii.a2b_base64(encoded, strict_mode=True), rows=due, layers=len(routing.moe_layers), k=routing.top_k
        )
    except NotRows as e:
        raise MalformedReply(f"{where}: routed_experts {e}") from None
    except ValueError as e:
        raise MalformedReply(f"{where}: routed_experts is not base64: {e}") from None
    moe = np.flatnonzero(routing.moe_layers)
    kept = found.experts
    if found.layers is None:
        kept = kept[:, moe]
    elif found.start != start or not np.array_equal(found.layers, moe):
        raise MalformedReply(
            f"{where}: routed_experts are rows from {found.start} on of decoder layers {found.layers.tolist()}, the "
            f"model routes in {moe.tolist()} and rows from {start} on were due"
        )
    if kept.size and (kept.min() < 0 or kept.max() >= routing.num_experts):
        bad = int(kept.max()) if kept.max() >= routing.num_experts else int(kept.min())
        raise MalformedReply(f"{where}: routed_experts has id {bad}, the model has {routing.num_experts} experts")
    small: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    small = kept.astype(np.uint8, copy=False) if routing.num_experts <= 256 else kept.astype(np.uint16, copy=False)
    return Rows(start, small, found.runs)


def clipped(runs: Sequence[RoutingRun], start: int) -> tuple[RoutingRun, ...]:
    """The runs without what lies before row `start`."""
    return tuple(msgspec.structs.replace(r, start=max(r.start, start)) for r in runs if r.end > start)


def _mask(meta: _Meta, ids: npt.NDArray[np.int32], where: str) -> tuple[SamplingMask, npt.NDArray[np.float32]]:
    """The kept ids of each token, rising (SGLang gives them by probability), and the log-probabilities inside."""
    kept, chosen = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if not len(ids):  # ended before its first token
        kept, chosen = kept or [], chosen or []
    if kept is None or chosen is None or len(kept) != len(ids) or len(chosen) != len(ids):
        raise MalformedReply(f"{where}: the sampling mask does not cover the {len(ids)} tokens")
    indptr = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum([len(k) for k in kept], out=indptr[1:])
    flat = np.fromiter(itertools.chain.from_iterable(kept), dtype=np.int64, count=int(indptr[-1]))
    of = np.repeat(np.arange(len(ids)), np.diff(indptr))
    flat = flat[np.lexsort((flat, of))]
    twice = (of[1:] == of[:-1]) & (flat[1:] == flat[:-1])
    if twice.any():
        at = int(twice.argmax())
        raise MalformedReply(f"{where}: output token {of[at]}: id {flat[at]} stands twice in its sampling mask")
    if flat.size and (flat.min() < 0 or flat.max() > np.iinfo(np.int32).max):
        raise MalformedReply(f"{where}: a sampling mask has an id that no vocabulary has")
    inside = np.zeros(len(ids), dtype=np.bool_)
    inside[of[flat == ids[of]]] = True
    if not inside.all():
        at = int((~inside).argmax())
        raise MalformedReply(f"{where}: output token {at}: token {ids[at]} was sampled outside its sampling mask")
    support = np.array(chosen, dtype=np.float32)
    if not np.isfinite(support).all():
        raise MalformedReply(f"{where}: a log-probability inside its sampling mask is not finite")
    return SamplingMask(indptr=indptr, ids=flat.astype(np.int32)), support
