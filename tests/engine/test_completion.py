"""Reading replies: what does not fit its tokens is an error with a name, never padded."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.completion import (
    Completion,
    GenerateRequest,
    RoutingShape,
    decode_experts,
    parse_replies,
    request_body,
    versions_of,
)
from moe_asyncrl.engine.errors import MalformedReply
from moe_asyncrl.replay.encoding import encode_rows

SHAPE = RoutingShape(moe_layers=(False, True, True), top_k=2, num_experts=8)
REQUEST = GenerateRequest(
    rid="r", input_ids=[5, 6, 7, 8], sampling=SamplingParams(temperature=1.0, max_new_tokens=3, top_k=4), version=5
)
ROWS = np.arange(6 * 3 * 2).reshape(6, 3, 2) % 8


def encode(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


REPLY: dict[str, Any] = {
    "output_ids": [11, 12, 13],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "num_retractions": 0,
        "weight_version": "9",
        "weight_versions": [{"version": "5", "start": 0, "end": 2}, {"version": "9", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None], [-2.5, 13, None]],
        "output_token_sampling_mask": [[11, 1], [12], [13, 2, 3]],
        "output_token_sampling_logprobs": [-0.1, 0.0, -0.3],
        "routed_experts": encode(ROWS),
    },
}


def parse(reply: Any, *, mask: bool = True) -> Completion:
    body = json.dumps([reply]).encode()
    (done,) = parse_replies(body, [REQUEST], engine="engine-3", routing=SHAPE, mask=mask, submitted=1.0, finished=2.0)
    return done


def test_every_field_arrives() -> None:
    c = parse(REPLY)
    assert (c.rid, c.engine, c.prompt_tokens, c.cached_tokens, c.retractions) == ("r", "engine-3", 4, 1, 0)
    assert (c.finish_reason, c.submitted, c.finished) == ("length", 1.0, 2.0)
    assert c.output_ids.dtype == np.int32 and c.output_ids.tolist() == [11, 12, 13]
    assert c.logprobs.dtype == np.float32 and c.logprobs.tolist() == [-0.5, -1.5, -2.5]
    # Per token, by the spans: not the version that was current when the reply was written.
    assert c.versions.dtype == np.int32 and c.versions.tolist() == [5, 5, 9]
    # The dense layer's row is gone, and the others have not moved.
    assert c.experts is not None and c.experts.dtype == np.uint8 and (c.experts == ROWS[:, 1:]).all()
    assert (
        c.mask is not None and c.mask.indptr.tolist() == [0, 2, 3, 6] and c.mask.ids.tolist() == [1, 11, 12, 2, 3, 13]
    )
    assert c.support_logprobs is not None and c.support_logprobs.dtype == np.float32


def test_nothing_sampled_means_no_rows() -> None:
    reply = copy.deepcopy(REPLY)
    reply["output_ids"] = []
    reply["meta_info"] |= {
        "completion_tokens": 0,
        "finish_reason": {"type": "abort", "message": "Aborted"},
        "output_token_logprobs": [],
        "weight_versions": [{"version": "5", "start": 0, "end": 0}],
        "routed_experts": None,
    }
    c = parse(reply, mask=False)
    assert len(c.output_ids) == len(c.versions) == 0 and c.experts is None and c.finish_detail == "Aborted"


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["meta_info"].update(fields)


def _delete(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["meta_info"].pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_delete("weight_versions"), "weight_versions"),
        (_delete("num_retractions"), "num_retractions"),
        (_delete("routed_experts"), "no routed_experts"),
        (_set(id="s"), "the reply is for s"),
        (_set(prompt_tokens=5), "5 prompt tokens, 4 were sent"),
        (_set(output_token_logprobs=REPLY["meta_info"]["output_token_logprobs"][:2]), "output_token_logprobs"),
        (_set(output_token_logprobs=[[None, 11, None], [-1.5, 12, None], [-2.5, 13, None]]), "output_token_logprobs"),
        (_set(output_token_logprobs=[[-0.5, 12, None], [-1.5, 11, None], [-2.5, 13, None]]), "of other tokens"),
        (_set(weight_versions=[{"version": "5", "start": 0, "end": 2}]), "cover 2 of 3"),
        (_set(weight_versions=[{"version": "5", "start": 1, "end": 3}]), "after 0 of 3"),
        (_set(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "not a number"),
        (_set(routed_experts=encode(ROWS[:-1])), "6 rows x 3 layers x 2 were due"),
        (_set(routed_experts="%%%"), "not base64"),
        (_set(routed_experts=encode(np.where(ROWS == 7, 8, ROWS))), "id 8, the model has 8"),
        (_set(routed_experts=encode(np.where(ROWS == 7, -1, ROWS))), "id -1"),
        (_set(output_token_sampling_mask=[[11], [12]]), "does not cover the 3 tokens"),
        (_set(output_token_sampling_mask=[[11], [1], [13]]), "token 12 was sampled outside"),
        (_set(output_token_sampling_mask=[[11], [12], [13, 2, 13]]), "output token 2: id 13 stands twice"),
        (_set(output_token_sampling_mask=[[11], [12, -1], [13]]), "no vocabulary has"),
        (_set(output_token_sampling_logprobs=[0.0, -1.0]), "does not cover the 3 tokens"),
    ],
)
def test_a_damaged_reply_is_named(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    reply = copy.deepcopy(REPLY)
    damage(reply)
    with pytest.raises(MalformedReply, match=message) as raised:
        parse(reply)
    assert str(raised.value).startswith("engine-3") and "\n" not in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[]", b'[{"output_ids": "x"}]'])
def test_a_body_of_another_kind_is_named(body: bytes) -> None:
    with pytest.raises(MalformedReply, match="engine-3"):
        parse_replies(body, [REQUEST], engine="engine-3", routing=None, mask=False, submitted=0, finished=0)


@given(st.lists(st.tuples(st.integers(-1, 2**31 - 1), st.integers(0, 5)), max_size=6))
def test_spans_become_versions(runs: list[tuple[int, int]]) -> None:
    spans, expected = [], []
    for version, length in runs:
        spans.append((str(version), len(expected), len(expected) + length))
        expected += [version] * length
    assert versions_of(spans, len(expected), "here").tolist() == expected
    with pytest.raises(MalformedReply):
        versions_of(spans, len(expected) + 1, "here")


@given(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from([4, 256, 257, 65536]))
def test_experts_survive_in_the_smallest_type(rows: int, moe: list[bool], experts: int) -> None:
    ids = np.random.default_rng(rows).integers(0, experts, size=(rows, len(moe), 2))
    shape = RoutingShape(moe_layers=tuple(moe), top_k=2, num_experts=experts)
    got = decode_experts(encode(ids), rows, shape, "here").experts
    assert got.dtype == (np.uint8 if experts <= 256 else np.uint16)
    assert (got == ids[:, moe]).all()


def test_the_body_carries_the_version_as_the_prefix_key() -> None:
    body = json.loads(request_body([REQUEST, REQUEST], experts=True, mask=True))
    assert body["extra_key"] == ["5", "5"] and body["rid"] == ["r", "r"]
    assert body["sampling_params"][0]["top_k"] == 4 and body["sampling_params"][0]["max_new_tokens"] == 3


def test_requests_that_cannot_be_meant_are_refused() -> None:
    endless = GenerateRequest(rid="x", input_ids=[1], sampling=SamplingParams(temperature=1.0), version=0)
    with pytest.raises(ValueError, match="x: a sampling mask needs a finite top_k"):
        request_body([endless], experts=False, mask=True)
    empty = GenerateRequest(rid="y", input_ids=[], sampling=SamplingParams(temperature=1.0), version=0)
    with pytest.raises(ValueError, match="y: empty prompt"):
        request_body([empty], experts=False, mask=False)


def test_each_request_of_a_list_gets_its_rows_from_its_own_start() -> None:
    """SGLang takes one start for a list, the first one: what is known of the others comes again and is cut off."""
    first = dataclasses.replace(REQUEST, rid="r", rows_from=4)
    second = dataclasses.replace(REQUEST, rid="s", rows_from=2)
    version, source = np.array([5, 5, 5, 9], dtype=np.int32), np.array([1, 1, 0, 0], dtype=np.int8)
    data = encode_rows(2, np.array([1, 2], dtype=np.uint16), ROWS[2:, 1:], version, source)
    replies = [copy.deepcopy(REPLY), copy.deepcopy(REPLY)]
    for reply, asked in zip(replies, (first, second), strict=True):
        reply["meta_info"] |= {"id": asked.rid, "routed_experts": base64.b64encode(data).decode()}
    one, two = parse_replies(
        json.dumps(replies).encode(),
        [first, second],
        engine="engine-3",
        routing=SHAPE,
        mask=True,
        submitted=1.0,
        finished=2.0,
    )
    for done, start in ((one, 4), (two, 2)):
        assert done.experts is not None and done.rows_from == start
        np.testing.assert_array_equal(done.experts, ROWS[start:, 1:])
    assert one.row_runs is not None and two.row_runs is not None
    assert [(r.start, r.end, r.version) for r in one.row_runs] == [(4, 5, 5), (5, 6, 9)], "no empty run"
    assert [(r.start, r.end, r.version) for r in two.row_runs] == [(2, 4, 5), (4, 5, 5), (5, 6, 9)]


WAITED: dict[str, Any] = {
    "output_ids": [11, 12],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "9",
        "weight_versions": [{"version": "5", "start": 0, "end": 2}],
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None]],
        "completion_tokens": 2,
    },
}


def test_a_request_aborted_while_it_waits_keeps_its_tokens_and_does_not_fail_its_list() -> None:
    """What SGLang 0.5 answers from its waiting queue: neither rows nor masks nor counts."""
    done = parse(WAITED, mask=False)
    assert (done.finish_reason, done.prompt_tokens, done.retractions) == ("abort", 4, 1)
    assert done.output_ids.tolist() == [11, 12] and done.versions.tolist() == [5, 5] and done.experts is None
    # Tokens whose masks are lost cannot be trained on: they are sampled anew (`rollout/resume.py`).
    done = parse(WAITED, mask=True)
    assert len(done.output_ids) == len(done.logprobs) == len(done.versions) == 0 and done.mask is not None
    never = copy.deepcopy(WAITED)
    never["output_ids"], never["meta_info"]["output_token_logprobs"] = [], []
    del never["meta_info"]["weight_versions"]
    done = parse(never, mask=False)
    assert (len(done.output_ids), done.retractions, done.experts) == (0, 0, None)
    # Planted: a reply that is cut short in any other way is still refused.
    for reason in ("length", "stop"):
        other = copy.deepcopy(WAITED)
        other["meta_info"]["finish_reason"]["type"] = reason
        with pytest.raises(MalformedReply, match="request r: the reply has no prompt_tokens"):
            parse(other, mask=False)
    other = copy.deepcopy(WAITED)
    other["meta_info"] |= {"prompt_tokens": 4, "num_retractions": 1, "cached_tokens": 0}
    with pytest.raises(MalformedReply, match="no routed_experts"):
        parse(other, mask=False)
