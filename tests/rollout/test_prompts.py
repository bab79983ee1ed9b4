"""Prompts against a tokenizer and a recipe, before anything starts."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tokenizer import Tokenizer
from moe_asyncrl.rollout.preflight import check_data, check_eval
from moe_asyncrl.rollout.prompts import train_prompts
from tests.engines.models import make_model
from tests.rollout.run import model_folder, recipe_for, write_jsonl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("prompts")
    return model_folder(make_model("qwen3_moe", folder / "weights"), folder)


@pytest.fixture
def recipe(model: pathlib.Path, tmp_path: pathlib.Path) -> Callable[..., Recipe]:
    def make(lines: list[dict[str, Any]], **sections: dict[str, Any]) -> Recipe:
        return recipe_for(model, write_jsonl(tmp_path / "p.jsonl", lines), **sections)

    return make


def test_text_and_messages(model: pathlib.Path, recipe: Callable[..., Recipe]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    r = recipe([{"prompt": "a<|eos|>b", "answer": "x"}, {"messages": messages, "answer": "x"}])
    tokenizer = Tokenizer.load(model)
    prompts = train_prompts(r, tokenizer)
    assert len(prompts) == 2
    assert prompts[0].ids.tolist() == tokenizer._inner.encode("a<|eos|>b")
    rendered = tokenizer._inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompts[1].ids.tolist() == tokenizer._inner.encode(rendered, add_special_tokens=False)
    assert rendered.startswith("<|bos|>") and prompts[1].ids.tolist().count(1) == 1  # one BOS, not two


def test_a_prompt_longer_than_the_context_is_named_before_the_run(recipe: Callable[..., Recipe]) -> None:
    fits, long = {"prompt": "x" * 248, "answer": "1"}, {"prompt": "x" * 249, "answer": "1"}
    check_data(recipe([fits]))
    with pytest.raises(UserError, match=r"p\.jsonl:2: the prompt has 249 tokens; with an answer of up to 8") as e:
        check_data(recipe([fits, long]))
    assert "model.max_context 256" in str(e.value)


def test_a_prompts_own_longest_answer(model: pathlib.Path, recipe: Callable[..., Recipe]) -> None:
    field = {"max_new_tokens_field": "length"}
    lines = [{"prompt": "x", "answer": "1", "length": 100}, {"prompt": "x", "answer": "1"}]
    prompts = train_prompts(recipe(lines, rollout=field), Tokenizer.load(model))
    assert [prompts[0].max_new_tokens, prompts[1].max_new_tokens] == [100, 8]
    for bad in (0, -1, "5", 1.5, True):
        with pytest.raises(UserError, match=r"p\.jsonl:1: 'length' must be a whole number of tokens above 0"):
            check_data(recipe([{"prompt": "x", "answer": "1", "length": bad}], rollout=field))
    with pytest.raises(UserError, match=r"p\.jsonl:1: the prompt has 1 tokens; with an answer of up to 256"):
        check_data(recipe([{"prompt": "x", "answer": "1", "length": 256}], rollout=field))


def test_what_else_is_found_before_the_run(recipe: Callable[..., Recipe], tmp_path: pathlib.Path) -> None:
    fine = {"prompt": "x", "answer": "1"}
    with pytest.raises(UserError, match=r"p\.jsonl:2: `answer` is missing; the reward 'exact' needs it"):
        check_data(recipe([fine, {"prompt": "x"}]))
    with pytest.raises(UserError, match="no module 'nowhere'"):
        check_data(recipe([fine], reward={"function": "nowhere:reward"}))
    with pytest.raises(UserError, match="holds no prompt"):
        check_data(recipe([]))
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"prompt": "x", "answer": "1"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"eval\.jsonl:2: not valid JSON"):
        check_data(recipe([fine], data={"train": str(tmp_path / "p.jsonl"), "eval": str(held_out)}))
    with pytest.raises(UserError, match=r"data\.eval is not set"):
        check_eval(recipe([fine]))
