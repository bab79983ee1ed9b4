"""Examples and the tokenizer: what is trained, in which order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.prompts import Prompt
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.train.sft import Examples, encode_example


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sft") / "model"
    make_tiny_model(path, "qwen3_moe", 0)
    return Tokenizer.load(path)


def prompt(
    text: str | None = "1+1=", answer: str | None = "2", messages: tuple[dict[str, str], ...] | None = None
) -> Prompt:
    return Prompt(source="p.jsonl:7", prompt=text, messages=messages, answer=answer, metadata={})


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_answer_and_its_end_are_trained_and_nothing_else(tokenizer: Tokenizer) -> None:
    tokens, trained = encode_example(prompt(), tokenizer, "auto", 64)
    assert tokens.dtype == np.int32
    start = tokenizer.encode_prompt(prompt())
    assert tokens[: len(start)].tolist() == start and not trained[: len(start)].any()
    assert trained[len(start) :].all()
    assert tokens[-1] == tokenizer.eos_ids[0]
    assert tokenizer.decode(tokens[len(start) :].tolist()) == "2"


def test_messages_are_rendered_by_the_template_and_prompts_never(tokenizer: Tokenizer) -> None:
    chat = prompt(None, messages=({"role": "user", "content": "hello"},))
    rendered = tokenizer.decode(tokenizer.encode_prompt(chat), keep_special=True)
    assert rendered.endswith("<|user|>hello<|eos|><|assistant|>")
    assert tokenizer.decode(tokenizer.encode_prompt(chat, "never"), keep_special=True) == "hello"
    assert tokenizer.decode(tokenizer.encode_prompt(prompt("hello")), keep_special=True) == "hello"


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    text = "añ→\n\t 日本 <|user|>"
    assert tokenizer.decode(tokenizer.encode_answer(text, "s", close=False), keep_special=True) == text


def test_a_batch_is_a_function_of_its_step(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [{"prompt": f"{i}=", "answer": str(i) * (1 + i % 3)} for i in range(10)])
    new = lambda: Examples(path, tokenizer, max_context=64, seed=3, shuffle=True, chat="auto")  # noqa: E731
    one, two = new(), new()
    late = [s.name for s in two.batch(4, 4)]
    assert [s.name for s in one.batch(0, 4)] != [s.name for s in one.batch(1, 4)]
    assert [s.name for s in one.batch(4, 4)] == late, "as when the steps before it had been taken"
    epoch = [s.tokens.tobytes() for step in range(5) for s in one.batch(step, 2)]
    assert len(set(epoch)) == 10, "an epoch has every example once"
    batch = one.batch(2, 4)
    assert sum(s.weight * int(s.trained.sum()) for s in batch) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "x"}, r"train\.jsonl:2: supervised learning needs an `answer`"),
        (
            {"prompt": "x" * 70, "answer": "y"},
            r"train\.jsonl:2: prompt and answer have 72 tokens, model\.max_context",
        ),
    ],
)
def test_a_bad_line_is_named(tokenizer: Tokenizer, tmp_path: Path, line: dict[str, object], said: str) -> None:
    path = write(tmp_path / "train.jsonl", [{"prompt": "1=", "answer": "1"}, line])
    with pytest.raises(UserError, match=said):
        Examples(path, tokenizer, max_context=64, seed=0, shuffle=False, chat="auto")


def test_a_tokenizer_that_cannot_be_used_is_one_clear_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spec = ModelSpec.from_hf(tokenizer.directory)
    with pytest.raises(UserError, match="no tokenizer there"):
        Tokenizer.load(tmp_path, spec)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text((tokenizer.directory / "config.json").read_text())
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        Tokenizer.load(tmp_path, spec)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    small = Tokenizer(tokenizer._inner, directory=tokenizer.directory, eos_ids=tokenizer.eos_ids, vocab_size=20)
    with pytest.raises(UserError, match=r"p\.jsonl:7: token id \d+ is outside the model's vocabulary of 20"):
        small.encode_prompt(prompt())


def test_messages_without_a_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", "qwen3_moe", 0)
    bare = Tokenizer.load(tmp_path / "m")
    bare._inner.chat_template = None
    with pytest.raises(UserError, match=r"p\.jsonl:7: `messages` need a chat template"):
        bare.encode_prompt(prompt(None, messages=({"role": "user", "content": "x"},)))
    bare._inner.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match=r"p\.jsonl:7: the chat template fails: no"):
        bare.encode_prompt(prompt(None, messages=({"role": "user", "content": "x"},)))
