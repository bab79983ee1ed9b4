"""Greedy evaluation: against transformers' own greedy answers, and what it does with answers that cannot be scored."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable

import pytest
import torch

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.evaluate import evaluate_at
from moe_asyncrl.rollout.role import due
from tests.engines.fixtures import TestEngine
from tests.rollout.run import model_folder, recipe_for, write_jsonl

LENGTH = 6


def greedy(engine: TestEngine, tokenizer: Tokenizer, text: str) -> str:
    ids = list(tokenizer._inner.encode(text))
    start = len(ids)
    while len(ids) < start + LENGTH and (len(ids) == start or ids[-1] not in tokenizer.eos_ids):
        ids.append(int(torch.argmax(engine.reference.logits(ids)[-1])))
    return tokenizer.decode(ids[start:])


def test_accuracy_is_the_share_of_right_greedy_answers(
    engine: Callable[..., TestEngine], tmp_path: pathlib.Path
) -> None:
    served = engine()
    model = model_folder(served.model, tmp_path)
    tokenizer = Tokenizer.load(model)
    texts = [f"{a}*{a}=" for a in range(8)]
    answers = {t: greedy(served, tokenizer, t) for t in texts}
    texts = [t for t in texts if answers[t].strip()] * 12  # more than one list
    lines = [{"prompt": t, "answer": answers[t] + ("" if i % 5 else " not")} for i, t in enumerate(texts)]
    wrong = sum(line["answer"].endswith(" not") for line in lines)
    file = write_jsonl(tmp_path / "eval.jsonl", lines)
    recipe = recipe_for(model, file, data={"eval": str(file)}, eval={"max_new_tokens": LENGTH})
    result = asyncio.run(evaluate_at(served.url, recipe))
    assert result.n == len(lines) > 64 and result.failed == 0
    assert result.accuracy == pytest.approx(1 - wrong / len(lines), abs=1e-12) and 0 < wrong < len(lines)
    assert result.metrics()["kind"] == "eval" and result.tokens > 0


def test_failures_are_counted_apart(engine: Callable[..., TestEngine], tmp_path: pathlib.Path) -> None:
    served = engine()
    model = model_folder(served.model, tmp_path)
    (tmp_path / "halves.py").write_text(
        "def reward(prompt, completion, answer, metadata):\n"
        "    if metadata['i'] % 2: raise ValueError('odd')\n"
        "    return 0.25\n"
        "def never(prompt, completion, answer, metadata):\n"
        "    raise ValueError('never')\n"
    )
    file = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "x", "i": i} for i in range(9)])

    def result(function: str) -> object:
        recipe = recipe_for(
            model, file, data={"eval": str(file)}, reward={"function": function, "folder": str(tmp_path)}
        )
        return asyncio.run(evaluate_at(served.url, recipe))

    half = result("halves:reward")
    assert (half.n, half.failed, half.accuracy) == (5, 4, 0.25)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"none of 9 answers could be scored; one reason: .*ValueError: never"):
        result("halves:never")


def test_when_an_evaluation_is_due() -> None:
    assert [v for v in range(1, 10) if due(v, 0, 4)] == [4, 5, 6, 7, 8, 9]
    assert not due(7, 4, 4) and due(8, 4, 4) and due(12, 5, 4)
    assert not due(100, 0, 0)
