"""Random requests to a real engine, and how far its log-probabilities and experts are from transformers'."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.completion import Completion, GenerateRequest
from tests.engines.fixtures import TestEngine
from tests.engines.models import Reference

COUNTER = itertools.count()


def requests(
    n: int,
    *,
    tokens: int = 12,
    seed: int = 0,
    version: int = -1,
    vocabulary: int = 512,
    longest: int = 40,
    **sampling: float,
) -> list[GenerateRequest]:
    """Random prompts of different lengths, all below `longest`."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": tokens, **sampling})  # type: ignore[arg-type]
    return [
        GenerateRequest(
            rid=f"sampling-{next(COUNTER)}",
            input_ids=rng.integers(4, vocabulary, size=int(rng.integers(1, longest))),
            sampling=params,
            version=version,
            ignore_eos=True,
        )
        for _ in range(n)
    ]


def generate(engine: TestEngine, batch: list[GenerateRequest], *, mask: bool = False) -> list[Completion]:
    """The completions, sent as one list."""

    async def go() -> list[Completion]:
        async with engine.client() as client:
            return await client.generate(batch, deadline_s=120, mask=mask)

    return asyncio.run(go())


def worst(
    reference: Reference, batch: list[GenerateRequest], done: list[Completion], temperature: float = 1.0
) -> float:
    """Largest deviation of a log-probability from transformers."""
    pairs = zip(batch, done, strict=True)
    return max(
        float(np.abs(reference.logprobs(r.input_ids, c.output_ids, temperature) - c.logprobs).max()) for r, c in pairs
    )


def least_shifted(reference: Reference, batch: list[GenerateRequest], done: list[Completion]) -> float:
    """A planted error: log-probabilities against the tokens shifted by one; its smallest trace in a request."""
    pairs = zip(batch, done, strict=True)
    return min(
        float(np.abs(reference.logprobs(r.input_ids, np.roll(c.output_ids, 1)) - c.logprobs).max()) for r, c in pairs
    )


def other_rows(reference: Reference, batch: list[GenerateRequest], done: list[Completion], *, roll: int = 0) -> int:
    """Rows (of a token in an MoE layer) whose experts are not those of transformers, in whatever order.

    `roll`: a planted error, rows of a layer so many further on.
    """
    wrong = 0
    for r, c in zip(batch, done, strict=True):
        assert c.experts is not None and c.experts.dtype == np.uint8
        expected = reference.experts([*r.input_ids, *c.output_ids][:-1])
        assert c.experts.shape == expected.shape
        found = np.roll(c.experts, roll, axis=1)
        wrong += int((np.sort(found, -1) != np.sort(expected, -1)).any(-1).sum())
    return wrong
