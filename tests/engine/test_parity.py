"""What a real engine samples, against transformers on the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.command import build_command
from moe_asyncrl.engine.completion import GenerateRequest, RoutingShape
from moe_asyncrl.engine.errors import MalformedReply
from tests.engines.fixtures import TestEngine
from tests.engines.sampling import COUNTER, generate, least_shifted, requests, worst

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [("qwen3_moe", 1, 1), ("qwen3", 1, 1), ("qwen3_moe", 2, 2)],
)
def test_logprobs_and_experts_equal_transformers(
    engine: Callable[..., TestEngine], family: str, tp: int, ep: int
) -> None:
    e = engine(family, tp=tp, ep=ep)
    batch = requests(24)
    done = generate(e, batch)
    assert worst(e.reference, batch, done) <= TOLERANCE
    assert least_shifted(e.reference, batch, done) >= 100 * TOLERANCE
    for r, c in zip(batch, done, strict=True):
        assert len(c.output_ids) == 12 and c.finish_reason == "length" and (c.versions == -1).all()
        ids = [*r.input_ids, *c.output_ids]
        if family == "qwen3":
            assert c.experts is None and e.routing is None
            continue
        assert e.routing is not None and c.experts is not None and c.experts.dtype == np.uint8
        expected = e.reference.experts(ids[:-1])
        assert c.experts.shape == expected.shape == (len(ids) - 1, sum(e.routing.moe_layers), 2)
        assert (c.experts == expected).all()
        # Planted: rows of the next layer.
        assert (np.roll(c.experts, 1, axis=1) != expected).any()


def test_logits_spread_and_experts_differ(engine: Callable[..., TestEngine]) -> None:
    """The test model can show a difference at all."""
    e = engine()
    logits = e.reference.logits(list(range(4, 60)))
    assert float(logits.std()) >= 1.0
    assert len(np.unique(e.reference.experts(list(range(4, 60))))) == 8


def test_one_list_equals_single_requests(engine: Callable[..., TestEngine]) -> None:
    """Greedy, so that both sample the same tokens: batching changes nothing but rounding."""
    e = engine()
    together = requests(16, temperature=0.0)
    alone = requests(16, temperature=0.0)
    listed = generate(e, together)
    for request, expected in zip(alone, listed, strict=True):
        (got,) = generate(e, [request])
        assert (got.output_ids == expected.output_ids).all()
        assert np.abs(got.logprobs - expected.logprobs).max() <= TOLERANCE
        assert got.experts is not None and (got.experts == expected.experts).all()


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.8, "top_p": 0.6, "top_k": 20}],
)
def test_logprobs_are_of_the_full_vocabulary_at_the_temperature(
    engine: Callable[..., TestEngine], sampling: dict[str, float]
) -> None:
    e = engine()
    batch = requests(6, seed=1, **sampling)
    assert worst(e.reference, batch, generate(e, batch), sampling["temperature"]) <= TOLERANCE


def test_sampling_mask_holds_the_kept_tokens_and_their_normalisation(engine: Callable[..., TestEngine]) -> None:
    e = engine()
    batch = requests(6, seed=2, temperature=0.8, top_k=20, top_p=0.6)
    for r, c in zip(batch, generate(e, batch, mask=True), strict=True):
        assert c.mask is not None and c.support_logprobs is not None
        assert c.mask.indptr[0] == 0 and len(c.mask.indptr) == len(c.output_ids) + 1
        rows = e.reference.logits([*r.input_ids, *c.output_ids])[len(r.input_ids) - 1 : -1] / 0.8
        for t, token in enumerate(c.output_ids.tolist()):
            kept = c.mask.ids[c.mask.indptr[t] : c.mask.indptr[t + 1]].tolist()
            # Top-p counts the mass of the whole vocabulary, not of the top-k tokens.
            probabilities, order = torch.softmax(rows[t], -1).sort(descending=True)
            count = min(20, int((probabilities.cumsum(-1) < 0.6).sum()) + 1)
            assert set(kept) == set(order[:count].tolist())
            inside = torch.log_softmax(rows[t, torch.tensor(kept)], -1)[kept.index(token)]
            assert abs(float(inside) - float(c.support_logprobs[t])) <= TOLERANCE


def test_end_token_stops(engine: Callable[..., TestEngine]) -> None:
    e = engine()
    batch = [
        GenerateRequest(
            rid=f"parity-{next(COUNTER)}",
            input_ids=[5, 6, 7],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=8),
            version=-1,
            stop_token_ids=tuple(range(3, 512)),
        )
    ]
    (c,) = generate(e, batch)
    assert c.finish_reason == "stop" and len(c.output_ids) == 1 and c.experts is not None and len(c.experts) == 3


def test_an_engine_that_does_not_capture_routing_is_named(engine: Callable[..., TestEngine]) -> None:
    """Fault 30: capture is off in the server, while the trainer will want rows to replay."""
    server = engine(family="qwen3")  # started without capture, as every server of a dense model
    assert "--enable-return-routed-experts" not in build_command(server.server.args, cpu=True).argv
    shape = RoutingShape(moe_layers=(True,) * 4, top_k=2, num_experts=8)
    with pytest.raises(MalformedReply, match=r"no routed_experts; was the server started with routing capture\?"):
        generate(dataclasses.replace(server, routing=shape), requests(1, tokens=2))
