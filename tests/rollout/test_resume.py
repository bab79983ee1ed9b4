"""A completion that was cut off goes on, and keeps what was recorded when each token was sampled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import RoutingRun, SamplingMask, SamplingParams
from moe_asyncrl.data.validate import validate
from moe_asyncrl.data.wire import encode
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from moe_asyncrl.rollout.resume import continuation, joined, may_go_on
from tests.rollout.test_assemble import completion, make, runs

PROMPT = np.arange(10, 14, dtype=np.int32)
REQUEST = GenerateRequest(
    rid="1-2-0-3", input_ids=PROMPT, sampling=SamplingParams(temperature=1.0, max_new_tokens=8), version=5
)


def cut(n: int, version: int, **fields: object) -> Completion:
    return completion(4, [version] * n, finish_reason="abort", asked_version=version, **fields)


def rest_of(asked: GenerateRequest, n: int, version: int, **fields: object) -> Completion:
    """What an engine answers: all rows, of which those before `rows_from` are not sent."""
    whole = completion(len(asked.input_ids), [version] * n, rid=asked.rid, **fields)
    assert whole.experts is not None
    return dataclasses.replace(whole, experts=whole.experts[asked.rows_from :], rows_from=asked.rows_from)


def test_rows_of_sampling_stay_and_the_second_reading_adds_its_own() -> None:
    """Fault 32: after an abort and resubmission, rows have neither the wrong length nor the wrong version."""
    first = cut(3, 5)
    asked = continuation(REQUEST, first, 1)
    assert (asked.rid, len(asked.input_ids), asked.sampling.max_new_tokens) == ("1-2-0-3+1", 7, 5)
    assert asked.rows_from == 6, "the last token has no row yet"
    done = joined(REQUEST, first, rest_of(asked, 2, 6))
    t = make(done)
    validate(t, num_experts=8)
    assert t.weight_version.tolist() == [-1] * 4 + [5, 5, 5, 6, 6]
    # Row 6 reads the last token of the first part and samples the first one of the second.
    assert runs(t) == [(0, 4, 5, "prefilled"), (4, 6, 5, "sampled"), (6, 7, 6, "prefilled"), (7, 8, 6, "sampled")]
    assert t.routing_experts is not None and first.experts is not None
    np.testing.assert_array_equal(t.routing_experts[:6], first.experts)
    # Planted: the second request's rows for everything have the right length, and other routes behind old tokens.
    other = rest_of(dataclasses.replace(asked, rows_from=0), 2, 6)
    assert other.experts is not None and len(other.experts) == 8
    assert (other.experts[:6] != first.experts).any()
    np.testing.assert_array_equal(joined(REQUEST, first, other).experts[:6], first.experts)


def test_what_each_token_has_is_joined() -> None:
    def masked(c: Completion) -> Completion:
        ids = np.sort(np.stack([c.output_ids, c.output_ids + 500], 1), 1).reshape(-1).astype(np.int32)
        mask = SamplingMask(indptr=np.arange(len(c.output_ids) + 1) * 2, ids=ids)
        return dataclasses.replace(c, mask=mask, support_logprobs=c.logprobs / 2)

    first = masked(cut(3, 5))
    second = masked(rest_of(continuation(REQUEST, first, 1), 2, 6))
    done = joined(REQUEST, first, second)
    assert done.mask is not None and done.mask.indptr.tolist() == [0, 2, 4, 6, 8, 10]
    assert done.mask.ids.tolist() == [*first.mask.ids, *second.mask.ids]  # type: ignore[union-attr]
    np.testing.assert_array_equal(done.logprobs, [*first.logprobs, *second.logprobs])
    np.testing.assert_array_equal(done.support_logprobs, [*first.logprobs / 2, *second.logprobs / 2])
    assert (done.rid, done.prompt_tokens, done.finish_reason, done.cached_tokens) == ("r", 4, "stop", 0)

    nothing = dataclasses.replace(masked(completion(7, [], rows=0, finish_reason="abort")), experts=None)
    again = joined(REQUEST, first, nothing)
    assert again.mask is not None and again.mask.indptr.tolist() == [0, 2, 4, 6] and may_go_on(REQUEST, again)
    np.testing.assert_array_equal(again.support_logprobs, first.support_logprobs)


@pytest.mark.parametrize("told", [False, True])
def test_rows_of_a_part_that_waited_come_with_the_next_one(told: bool) -> None:
    """A retracted request that is aborted while it waits has no rows; its tokens are other weights' than its rows."""
    first = dataclasses.replace(cut(3, 5), experts=None)
    asked = continuation(REQUEST, first, 1)
    assert asked.rows_from == 0
    second = rest_of(asked, 2, 6, asked_version=6)
    assert second.experts is not None
    if told:
        said = (
            RoutingRun(start=0, end=7, version=6, source="prefilled"),
            RoutingRun(start=7, end=8, version=6, source="sampled"),
        )
        second = dataclasses.replace(second, row_runs=said)
    t = make(joined(REQUEST, first, second))
    assert runs(t) == [(0, 7, 6, "prefilled"), (7, 8, 6, "sampled")]
    np.testing.assert_array_equal(t.routing_experts, second.experts)
    assert encode(t)[0].other_version_sampled == 3, "the first part's tokens were not routed by these rows"


def test_a_second_part_that_waited_leaves_its_rows_to_the_third() -> None:
    first = cut(3, 5)
    second = dataclasses.replace(rest_of(continuation(REQUEST, first, 1), 2, 5, finish_reason="abort"), experts=None)
    both = joined(REQUEST, first, second)
    assert both.row_runs == (
        RoutingRun(start=0, end=4, version=5, source="prefilled"),
        RoutingRun(start=4, end=6, version=5, source="sampled"),
        RoutingRun(start=6, end=8, version=-1, source="missing"),
    )
    asked = continuation(REQUEST, both, 2)
    assert asked.rows_from == 6
    t = make(joined(REQUEST, both, rest_of(asked, 1, 6, asked_version=6)))
    assert runs(t) == [(0, 4, 5, "prefilled"), (4, 6, 5, "sampled"), (6, 9, 6, "prefilled")]
    assert encode(t)[0].other_version_sampled == 2


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.integers(0, 3), min_size=1, max_size=3), told=st.booleans())
def test_any_number_of_cuts_makes_a_valid_trajectory(parts: list[int], told: bool) -> None:
    done = cut(1, 0)
    for version, n in enumerate(parts, 1):
        if not may_go_on(REQUEST, done):
            break
        asked = continuation(REQUEST, done, version)
        n = min(n, asked.sampling.max_new_tokens)
        fields: dict[str, object] = {"finish_reason": "abort", "asked_version": version}
        if n == 0:
            more = dataclasses.replace(completion(len(asked.input_ids), [], rows=0, **fields), experts=None)
        else:
            more = rest_of(asked, n, version, **fields)
            if told:
                end = len(asked.input_ids) + n - 1
                run = RoutingRun(start=asked.rows_from, end=end, version=version, source="sampled")
                more = dataclasses.replace(more, row_runs=(run,))
        done = joined(REQUEST, done, more)
    t = make(done)
    validate(t, num_experts=8)
    sampled = np.flatnonzero(t.loss_mask)
    rows = np.repeat([r.version for r in t.routing_runs], [r.end - r.start for r in t.routing_runs])
    assert rows[sampled - 1].tolist() == t.weight_version[sampled].tolist()


def test_what_was_aborted_before_its_first_token_is_asked_for_anew() -> None:
    nothing = dataclasses.replace(completion(4, [], rows=0, finish_reason="abort"), experts=None)
    assert may_go_on(REQUEST, nothing)
    asked = continuation(REQUEST, nothing, 1)
    assert asked.input_ids.tolist() == PROMPT.tolist() and asked.rows_from == 0  # type: ignore[union-attr]
    assert asked.sampling == REQUEST.sampling
    second = rest_of(asked, 2, 6)
    t = make(joined(REQUEST, nothing, second))
    assert runs(t) == runs(make(second))
    np.testing.assert_array_equal(t.routing_experts, second.experts)


def test_only_a_partial_answer_goes_on() -> None:
    assert may_go_on(REQUEST, cut(3, 5))
    assert not may_go_on(REQUEST, completion(4, [5, 5]))
    assert not may_go_on(REQUEST, cut(8, 5))
    first = cut(3, 5)
    with pytest.raises(ValueError, match="read 4 tokens"):
        joined(REQUEST, first, completion(4, [6]))
