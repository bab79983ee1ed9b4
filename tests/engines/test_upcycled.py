"""A small real language model made into a mixture: three programs agree on English, and it still answers."""

from __future__ import annotations

import asyncio
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from moe_asyncrl.cli import main
from moe_asyncrl.data.prompt import Prompt
from moe_asyncrl.data.trajectory import SamplingParams
from moe_asyncrl.engine.client import EngineClient
from moe_asyncrl.engine.command import EngineArgs
from moe_asyncrl.engine.completion import Completion, GenerateRequest, RoutingShape
from moe_asyncrl.engine.server import Server
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tokenizer import Tokenizer
from tests.engines.smollm2 import write_smollm2
from tests.pool.pool import WorkerPool

MEAN, MOST = 1e-5, 1e-3
"""Tolerances: of the mean and of the largest absolute difference of log-probabilities."""
TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal.\n\n"
    "Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so "
    "dedicated, can long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of "
    "that field, as a final resting place for those who here gave their lives that that nation might live. It is "
    "altogether fitting and proper that we should do this.\n\n"
    "But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The "
    "brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract. "
    "The world will little note, nor long remember what we say here, but it can never forget what they did here."
)
"""From A. Lincoln's address at Gettysburg, 1863."""

Values = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The upcycled model (1.6 GB); the dense one it is made of is gone."""
    root = tmp_path_factory.mktemp("upcycled")
    write_smollm2(root / "dense")
    assert main(["upcycle", str(root / "dense"), str(root / "mixture")]) == 0
    shutil.rmtree(root / "dense")
    yield root / "mixture"
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def text(mixture: Path) -> list[int]:
    ids = Tokenizer.load(mixture).encode_answer(TEXT, "text", close=False)
    assert len(ids) > 180
    return ids


@pytest.fixture(scope="module")
def expected(mixture: Path, text: list[int]) -> Values:
    """transformers' log-probabilities of the text's tokens behind the first, in float64.

    In float32 its own rounding, which depends on the machine's matrix products, is as large as what is compared.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        mixture, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1]
    found = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].numpy()
    # It knows English: chance would be -10.8, the logarithm of the vocabulary.
    assert -3.5 < found.mean() < -0.5
    return found


@pytest.fixture(scope="module")
def server(mixture: Path, expected: Values, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine on the mixture. After `expected`, so that transformers' copy is gone."""
    args = EngineArgs(model=str(mixture), port=0, python=sys.executable, max_total_tokens=4096, max_running_requests=8)
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with Server.start(args, cpu=True, log_path=log, name="upcycled") as started:
        started.wait_ready(240)
        yield started


def client(server: Server, mixture: Path) -> EngineClient:
    routing = RoutingShape.of(ModelSpec.from_hf(mixture))
    return EngineClient(server.url, name=server.name, routing=routing)


def agree(found: Values, expected: Values) -> None:
    difference = np.abs(found - expected)
    assert difference.mean() <= MEAN and difference.max() <= MOST, (difference.mean(), difference.max())


def test_megatron_agrees_and_sees_two_experts_exchanged(
    mixture: Path, text: list[int], expected: Values, pool: WorkerPool
) -> None:
    """On two expert-parallel ranks. Experts differ by 2 % of their weights, and one pair in 30 layers is exchanged."""
    ranks = pool.run(
        "tests.engines.upcycled_jobs:score",
        layout=Layout(dp=2, ep=2),
        timeout_s=300.0,
        hf_dir=str(mixture),
        ids=text,
        swap_in=12,
    )
    for right, swapped in ranks:
        agree(np.array(right), expected)
        difference = np.abs(np.array(swapped) - expected)
        assert difference.mean() >= 100 * MEAN and difference.max() >= 100 * MOST


def test_an_engine_agrees(server: Server, mixture: Path, text: list[int], expected: Values) -> None:
    async def go() -> bytes:
        async with client(server, mixture) as engine:
            body = {
                "input_ids": text,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            return await engine._call(
                "POST", "/generate", msgspec.json.encode(body), 120.0, "the log-probabilities of a text"
            )

    reply = msgspec.json.decode(asyncio.run(go()))
    rows = reply["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == text
    agree(np.array([row[0] for row in rows[1:]]), expected)


def ask(server: Server, mixture: Path, question: str, tokens: int) -> tuple[list[int], Completion]:
    """The prompt, and the greedy answer."""
    prompt = Prompt(
        source="question",
        prompt=None,
        messages=({"role": "user", "content": question},),
        answer=None,
        metadata={},
    )
    ids = Tokenizer.load(mixture).encode_prompt(prompt)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens)

    async def go() -> list[Completion]:
        async with client(server, mixture) as engine:
            request = GenerateRequest(rid=uuid.uuid4().hex, input_ids=ids, sampling=sampling, version=-1)
            return await engine.generate([request], deadline_s=120)

    (done,) = asyncio.run(go())
    return ids, done


def test_it_still_answers(server: Server, mixture: Path) -> None:
    """By the chat template that came along, and until the end token of its generation settings."""
    ids, done = ask(server, mixture, "What is the capital of France?", 48)
    assert "Paris" in Tokenizer.load(mixture).decode(done.output_ids.tolist())
    assert done.finish_reason == "stop"
    assert done.experts is not None and done.experts.shape == (len(ids) + len(done.output_ids) - 1, 30, 2)
    chosen = np.bincount(done.experts.reshape(-1), minlength=4) / done.experts.size
    assert chosen.min() > 0.1, "every expert is used"
