"""Trajectories to test with: a plain builder, and a strategy that fills every field, also those nothing fills yet."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import (
    Identity,
    PolicyAsked,
    RoutingRun,
    SamplingMask,
    SamplingParams,
    ScorerReport,
    Segment,
    StepRewards,
    TeacherTopK,
    Trajectory,
)


def trajectory(
    index: int = 0,
    attempt: int = 0,
    sample: int = 0,
    *,
    version: int = 0,
    tokens: int = 12,
    layers: int = 2,
    k: int = 2,
) -> Trajectory:
    """Half prompt, half answer, all of one version; routed through `layers` layers if there are any."""
    seed = np.random.default_rng([index, attempt, sample])
    sampled = np.arange(tokens) >= tokens // 2
    routed = layers > 0
    return Trajectory(
        identity=Identity(
            trajectory=f"{index}.{attempt}.{sample}",
            prompt=f"p.jsonl:{index}",
            index=index,
            attempt=attempt,
            sample=sample,
        ),
        policy=PolicyAsked(base_version=version),
        segments=(
            Segment(start=0, end=tokens // 2, role="user"),
            Segment(start=tokens // 2, end=tokens, role="policy", sampling=SamplingParams(temperature=1.0)),
        ),
        tokens=seed.integers(0, 1000, tokens).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -seed.random(tokens), np.nan).astype(np.float32),
        weight_version=np.where(sampled, version, -1).astype(np.int32),
        routing_experts=seed.integers(0, 8, (tokens - 1, layers, k)).astype(np.uint8) if routed else None,
        routing_runs=(RoutingRun(start=0, end=tokens - 1, version=version, source="sampled"),) if routed else (),
        rewards={"total": 1.0},
        score_status={"exact": ScorerReport(status="ok", value=1.0)},
    )


def group(index: int = 0, attempt: int = 0, *, size: int = 2, **kwargs: Any) -> list[Trajectory]:
    """The samples of one prompt."""
    return [trajectory(index, attempt, i, **kwargs) for i in range(size)]


names = st.text(st.characters(codec="utf-8"), max_size=8)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any trajectory that keeps the contract, with every optional field present or absent on its own."""
    t = draw(st.integers(2, 20))
    first = draw(st.integers(1, t))
    mask = np.zeros(t, dtype=bool)
    mask[first:] = draw(st.lists(st.booleans(), min_size=t - first, max_size=t - first))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    version = np.where(mask, seed.integers(0, 9, t), -1).astype(np.int32)
    layers, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    wide = draw(st.booleans())
    experts, runs = None, ()
    if draw(st.booleans()):
        experts = seed.integers(0, 60000 if wide else 250, (t - 1, layers, k)).astype(np.uint16 if wide else np.uint8)
        runs = _runs(draw, t - 1)
    tokens = seed.integers(0, 2**31 - 2, t).astype(np.int32)
    logprobs = np.where(mask, -seed.random(t) * 9, np.nan).astype(np.float32)
    sampling, sampling_mask, support = SamplingParams(temperature=0.7, max_new_tokens=t), None, None
    if draw(st.booleans()):
        sampling = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, max_new_tokens=t)
        others = seed.integers(0, 999, (t, 2)).tolist()
        kept = [sorted({int(tokens[i]), *others[i]}) if mask[i] else [] for i in range(t)]
        indptr = np.concatenate([[0], np.cumsum([len(ids) for ids in kept])]).astype(np.int64)
        sampling_mask = SamplingMask(indptr, np.array([i for ids in kept for i in ids], dtype=np.int32))
        support = (logprobs / 2).astype(np.float32)
    n_steps = draw(st.integers(0, 3))
    steps = StepRewards(np.arange(n_steps, dtype=np.int32), seed.random(n_steps).astype(np.float32))
    top = TeacherTopK(seed.integers(0, 99, (t, 3)).astype(np.int32), -seed.random((t, 3)).astype(np.float32))
    reports = st.builds(
        ScorerReport, status=st.sampled_from(["ok", "failed", "timeout"]), value=st.none() | finite, detail=names
    )
    return Trajectory(
        identity=Identity(
            trajectory=draw(names),
            prompt=draw(names),
            index=draw(st.integers(0, 2**40)),
            attempt=draw(st.integers(0, 9)),
            sample=draw(st.integers(0, 99)),
            episode=draw(st.none() | names),
            engine=draw(names),
            epoch=draw(st.integers(0, 9)),
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            submitted=draw(finite),
            finished=draw(finite),
        ),
        policy=PolicyAsked(base_version=draw(st.integers(0, 9)), adapter=draw(st.none() | names), adapter_version=3),
        segments=(
            Segment(start=0, end=first, role="user", agent=draw(st.none() | names)),
            Segment(
                start=first,
                end=t,
                role="policy",
                sampling=sampling,
                parent=draw(st.none() | names),
                fork_position=draw(st.none() | st.integers(0, t)),
            ),
        ),
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        weight_version=version,
        support_logprobs=support,
        routing_experts=experts,
        routing_runs=runs,
        sampling_mask=sampling_mask,
        rewards=draw(st.dictionaries(names, finite, max_size=3)),
        score_status=draw(st.dictionaries(names, reports, max_size=3)),
        step_rewards=steps if draw(st.booleans()) else None,
        teacher_logprobs=-seed.random(t).astype(np.float32) if draw(st.booleans()) else None,
        teacher_topk=top if draw(st.booleans()) else None,
        teacher_version=draw(st.none() | names),
        metadata=draw(st.dictionaries(names, names, max_size=3)),
    )


def _runs(draw: st.DrawFn, rows: int) -> tuple[RoutingRun, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
    edges = [0, *cuts, rows]
    sources = st.sampled_from(["sampled", "prefilled", "cached", "missing"])
    return tuple(
        RoutingRun(start=a, end=b, version=draw(st.integers(-1, 9)), source=draw(sources))
        for a, b in itertools.pairwise(edges)
    )
