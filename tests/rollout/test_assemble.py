"""A completion becomes a trajectory: shapes, versions and what is known of each routing row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import Identity, SamplingMask, SamplingParams, ScorerReport, Trajectory
from moe_asyncrl.data.validate import known_rows, validate
from moe_asyncrl.data.wire import decode, encode
from moe_asyncrl.engine.completion import Completion
from moe_asyncrl.rollout.assemble import assemble, mask_rows

LAYERS, K, EXPERTS = 2, 2, 8


def completion(p: int, versions: list[int], *, rows: int | None = None, **fields: Any) -> Completion:
    n = len(versions)
    rng = np.random.default_rng(p * 1000 + n)
    base: dict[str, Any] = {
        "rid": "r",
        "engine": "engine-0",
        "asked_version": versions[0] if versions else 0,
        "prompt_tokens": p,
        "output_ids": rng.integers(3, 500, n).astype(np.int32),
        "logprobs": -rng.random(n).astype(np.float32),
        "versions": np.array(versions, dtype=np.int32),
        "experts": rng.integers(0, EXPERTS, (p + n - 1 if rows is None else rows, LAYERS, K)).astype(np.uint8),
        "mask": None,
        "support_logprobs": None,
        "finish_reason": "stop",
        "finish_detail": "",
        "cached_tokens": 0,
        "retractions": 0,
        "submitted": 1.0,
        "finished": 2.0,
    }
    return Completion(**{**base, **fields})


def make(c: Completion) -> Trajectory:
    t = assemble(
        np.arange(10, 10 + c.prompt_tokens, dtype=np.int32),
        c,
        identity=Identity(trajectory="1-2-0-3", prompt="f:1", index=2, sample=3, epoch=1),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8),
        rewards={"total": 0.5},
        score_status={"exact": ScorerReport(status="ok", value=0.5)},
        metadata={"answer": "7"},
    )
    validate(t, num_experts=EXPERTS)
    return t


def runs(t: Trajectory) -> list[tuple[int, int, int, str]]:
    return [(r.start, r.end, r.version, r.source) for r in t.routing_runs]


def test_kept_ids_stand_at_the_tokens_that_were_sampled_from_them() -> None:
    c = completion(4, [3, 3, 3])
    ids = np.array([*c.output_ids[:1], *sorted([1, int(c.output_ids[1])]), *c.output_ids[2:]], dtype=np.int32)
    mask = SamplingMask(indptr=np.array([0, 1, 3, 4], dtype=np.int64), ids=ids)
    kept, support = mask_rows(dataclasses.replace(c, mask=mask, support_logprobs=c.logprobs / 2), 4)
    assert kept is not None and support is not None
    assert kept.indptr.tolist() == [0, 0, 0, 0, 0, 1, 3, 4] and kept.ids.tolist() == ids.tolist()
    assert np.isnan(support[:4]).all()
    np.testing.assert_array_equal(support[4:], c.logprobs / 2)
    assert mask_rows(c, 4) == (None, None)


def test_fields() -> None:
    c = completion(4, [3, 3, 3])
    t = make(c)
    assert t.tokens.tolist() == [10, 11, 12, 13, *c.output_ids.tolist()]
    assert t.loss_mask.tolist() == [False] * 4 + [True] * 3
    assert np.isnan(t.logprobs[:4]).all()
    np.testing.assert_array_equal(t.logprobs[4:], c.logprobs)
    assert t.weight_version.tolist() == [-1] * 4 + [3] * 3
    assert [(s.start, s.end, s.role) for s in t.segments] == [(0, 4, "user"), (4, 7, "policy")]
    assert (t.policy.base_version, t.identity.engine, t.identity.finish_reason) == (3, "engine-0", "stop")
    assert (t.identity.submitted, t.identity.finished, t.identity.sample) == (1.0, 2.0, 3)
    np.testing.assert_array_equal(t.routing_experts, c.experts)


def test_rows_of_a_plain_completion() -> None:
    assert runs(make(completion(4, [3, 3, 3]))) == [(0, 4, 3, "prefilled"), (4, 6, 3, "sampled")]
    assert runs(make(completion(4, [3, 3, 3], cached_tokens=2))) == [
        (0, 2, 3, "cached"),
        (2, 4, 3, "prefilled"),
        (4, 6, 3, "sampled"),
    ]
    # The last prompt token is read in any case: the pass that reads it samples the first new token.
    assert runs(make(completion(4, [3], cached_tokens=4))) == [(0, 3, 3, "cached"), (3, 4, 3, "prefilled")]


def test_an_update_in_flight_labels_each_token_and_row_by_what_computed_it() -> None:
    """Fault 38: versions come from the sampler's spans, token by token."""
    t = make(completion(3, [5, 5, 6, 6]))
    assert t.weight_version.tolist() == [-1, -1, -1, 5, 5, 6, 6]
    # Row 3 reads token 3 and samples token 4 (version 5); row 4 samples token 5, the first one of version 6.
    assert runs(t) == [(0, 3, 5, "prefilled"), (3, 4, 5, "sampled"), (4, 6, 6, "sampled")]
    assert t.oldest_version == 5


def test_weights_that_changed_before_the_first_token_leave_the_prompts_rows_unknown() -> None:
    t = make(completion(4, [6, 6], asked_version=5, cached_tokens=2))
    assert runs(t) == [(0, 2, -1, "cached"), (2, 3, -1, "prefilled"), (3, 4, 6, "prefilled"), (4, 5, 6, "sampled")]
    assert t.policy.base_version == 5 and t.oldest_version == 6


def test_a_retraction_does_not_pair_new_routes_with_old_versions() -> None:
    """Fault 25: after the second reading the rows of earlier tokens may be of newer weights."""
    same = make(completion(4, [6, 6, 6], retractions=1))
    assert runs(same) == [(0, 5, 6, "prefilled"), (5, 6, 6, "sampled")]
    mixed = make(completion(4, [5, 5, 6, 6], retractions=1))
    assert runs(mixed) == [(0, 5, -1, "prefilled"), (5, 6, 6, "prefilled"), (6, 7, 6, "sampled")]


def test_rows_that_are_not_there_are_missing_and_never_zero() -> None:
    """Fault 34."""
    t = make(completion(4, [3, 3, 3], rows=4))
    assert runs(t) == [(0, 4, 3, "prefilled"), (4, 6, -1, "missing")]
    assert t.routing_experts is not None and (t.routing_experts[4:] == 255).all()
    assert known_rows(t.routing_runs, 6).tolist() == [True] * 4 + [False] * 2
    none_at_all = make(completion(4, [3, 3, 3], rows=0))
    assert runs(none_at_all) == [(0, 6, -1, "missing")]


def test_a_dense_model_has_no_rows() -> None:
    t = make(completion(4, [3], experts=None))
    assert t.routing_experts is None and t.routing_runs == ()


def test_what_does_not_fit_is_refused() -> None:
    """Fault 33 and its kin: rows and tokens of different sequences are never joined."""
    with pytest.raises(ValueError, match="7 routing rows for 7 tokens"):
        make(completion(4, [3, 3, 3], rows=7))
    with pytest.raises(ValueError, match="3 tokens after 5, the prompt has 4"):
        c = completion(4, [3, 3, 3])
        other = dataclasses.replace(c, prompt_tokens=5)
        assemble(
            np.arange(4, dtype=np.int32),
            other,
            identity=Identity(trajectory="x", prompt="", index=0),
            sampling=SamplingParams(temperature=1.0),
            rewards={},
            score_status={},
            metadata={},
        )
    with pytest.raises(ValueError, match="0 tokens after 4"):
        make(completion(4, []))


@given(
    p=st.integers(1, 6),
    steps=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    ahead=st.integers(0, 1),
    cached=st.integers(0, 8),
    retractions=st.integers(0, 2),
    lacking=st.integers(0, 3),
)
def test_every_completion_makes_a_valid_trajectory(
    p: int, steps: list[int], ahead: int, cached: int, retractions: int, lacking: int
) -> None:
    versions = np.cumsum(steps).tolist()
    rows = max(0, p + len(versions) - 1 - lacking)
    c = completion(
        p, versions, rows=rows, asked_version=versions[0] - ahead, cached_tokens=cached, retractions=retractions
    )
    t = make(c)
    header, frames = encode(t)
    back = decode(header, [bytes(f) for f in frames])
    np.testing.assert_array_equal(back.tokens, t.tokens)
    assert back.routing_runs == t.routing_runs
    for run in t.routing_runs:
        if run.version != -1 and run.start >= p - 1:  # a known version is that of the token which the row samples
            assert (t.weight_version[run.start + 1 : run.end + 1] == run.version).all()
