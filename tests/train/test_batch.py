"""What stands where in a packed micro-batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.replay.rows import ReplayMismatch
from moe_asyncrl.train.batch import PADDING, RouterShape, Sample, make_micro_batch

ROUTER = RouterShape(layers=2, experts=8, top_k=2)


def sample(name: str, n: int, seed: int = 0) -> Sample:
    draw = np.random.default_rng([seed, n])
    trained = draw.random(n) < 0.5
    trained[0] = False
    experts = draw.random((n - 1, ROUTER.layers, ROUTER.experts)).argsort(-1)[..., : ROUTER.top_k].astype(np.uint8)
    return Sample(
        name=name,
        tokens=draw.integers(0, 99, n).astype(np.int32),
        trained=trained,
        weight=float(draw.random()),
        advantage=float(draw.normal()),
        sampler_logprobs=np.where(trained, -draw.random(n), np.nan).astype(np.float32),
        experts=experts,
    )


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(2, 12), max_size=8), multiple=st.integers(1, 8))
def test_every_position_has_what_belongs_to_it(lengths: list[int], multiple: int) -> None:
    given_samples = [sample(f"t{i}", n, i) for i, n in enumerate(lengths)]
    b = make_micro_batch(given_samples, multiple=multiple, router=ROUTER)
    assert b.rows is not None and b.known is not None
    assert b.length % multiple == 0 and b.length >= 1 and b.length - b.real < multiple + (b.real == 0)
    assert b.offsets[-1] == b.length and b.samples == len(lengths)
    at = 0
    for s in given_samples:
        for i in range(len(s.tokens) - 1):
            assert b.tokens[0, at] == s.tokens[i] and b.labels[0, at] == s.tokens[i + 1]
            assert b.positions[0, at] == i
            assert bool(b.trained[at]) == bool(s.trained[i + 1])
            assert b.advantages[at] == np.float32(s.advantage)
            if s.trained[i + 1]:
                assert b.weights[at] == np.float32(s.weight)
                assert b.sampler_logprobs[at] == s.sampler_logprobs[i + 1]  # type: ignore[index]
            else:
                assert b.weights[at] == 0 and b.sampler_logprobs[at] == 0
            assert b.rows[at].tolist() == s.experts[i].tolist()  # type: ignore[index]
            at += 1
    assert at == b.real
    assert not b.trained[at:].any() and not b.weights[at:].any()
    assert b.known.all()
    padding = b.rows[at:]
    assert ((padding >= 0) & (padding < ROUTER.experts)).all() and (padding[..., 0] != padding[..., 1]).all()
    assert [o.name for o in b.owners] == [s.name for s in given_samples] + [PADDING] * (b.length > b.real)
    assert all(torch.isfinite(x).all() for x in (b.weights, b.advantages, b.sampler_logprobs))


def test_unknown_rows_stay_unknown() -> None:
    whole = sample("t", 6)
    known = np.array([True, True, False, True, True])
    b = make_micro_batch([dataclasses.replace(whole, known=known)], router=ROUTER)
    assert b.known is not None and b.known.tolist() == known.tolist()
    b = make_micro_batch([dataclasses.replace(whole, experts=None), sample("u", 3)], multiple=4, router=ROUTER)
    assert b.known is not None and b.known.tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize("cut", [np.s_[:-1], np.s_[:, :1], np.s_[:, :, :1]])
def test_rows_of_another_shape_name_trajectory_and_rank(cut: object) -> None:
    whole = sample("run/7", 6)
    broken = dataclasses.replace(whole, experts=whole.experts[cut])  # type: ignore[index]
    with pytest.raises(ReplayMismatch, match="trajectory run/7, rank 3: routing rows"):
        make_micro_batch([broken], router=ROUTER, rank=3)


def test_arrays_of_another_length() -> None:
    whole = sample("t", 6)
    with pytest.raises(ValueError, match="6 tokens, 5 log-probabilities"):
        make_micro_batch([dataclasses.replace(whole, sampler_logprobs=whole.sampler_logprobs[1:])])  # type: ignore[index]
    with pytest.raises(ValueError, match="1 tokens"):
        make_micro_batch([dataclasses.replace(whole, tokens=whole.tokens[:1])])
