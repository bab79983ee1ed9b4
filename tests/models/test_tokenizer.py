"""The tokenizer is the one that transformers itself would take, also where we take a shorter way to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from moe_asyncrl.models.families import FAMILIES
from moe_asyncrl.models.tiny import make_tiny_model
from moe_asyncrl.models.tokenizer import GENERIC, Tokenizer, _loader

TEXTS = ("07+35=", "Größe 12 €\n\n  spaces", "<|user|>hello<|eos|>", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with its tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tiny_model(path, "qwen3_moe", 0)
    return path


@pytest.mark.parametrize("named", GENERIC)
@pytest.mark.parametrize("family", sorted({f.tiny_config["model_type"] for f in FAMILIES.values()}))
def test_the_generic_class_is_what_transformers_takes(model: Path, tmp_path: Path, family: str, named: str) -> None:
    for file in model.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    written = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**written, "tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 512}))
    ours = _loader(tmp_path).from_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert _loader(tmp_path) is transformers.PreTrainedTokenizerFast
    assert type(ours) is type(theirs)
    assert ours.chat_template == theirs.chat_template and ours.special_tokens_map == theirs.special_tokens_map
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    "change", [{"tokenizer_class": "Qwen2Tokenizer"}, {"auto_map": {"AutoTokenizer": ["x.Y", None]}}]
)
def test_any_other_class_is_left_to_transformers(model: Path, tmp_path: Path, change: dict[str, object]) -> None:
    written = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**written, **change}))
    assert _loader(tmp_path) is transformers.AutoTokenizer


def test_without_a_configuration_of_its_own(tmp_path: Path) -> None:
    assert _loader(tmp_path) is transformers.AutoTokenizer


def test_it_loads(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode_answer("42", "here", close=False)) == "42"
