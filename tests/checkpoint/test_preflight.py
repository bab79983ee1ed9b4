"""What is refused before anything is started: layouts and contexts that the model does not have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_asyncrl.checkpoint.preflight import check_model
from moe_asyncrl.config.recipe import Algorithm, Data, Engine, Model, Recipe, Trainer, Weights
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.tiny import make_tiny_model
from tests.checkpoint.formats.quantised import fp8_copy, mxfp4_copy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preflight") / "model"
    make_tiny_model(path, "qwen3_moe", 0)
    return path


def recipe(model: Path, *, max_context: int = 1024, **sections: Any) -> Recipe:
    return Recipe(model=Model(path=str(model), max_context=max_context), data=Data(train="t.jsonl"), **sections)


def test_a_model_that_fits_is_accepted(model: Path) -> None:
    spec = check_model(recipe(model, trainer=Trainer(tp=2, dp=2, ep=2, etp=1), engine=Engine(tp=2, ep=2)))
    assert spec.is_moe


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": Trainer(tp=3)}, "tp 3 is not a multiple of 2 key/value heads"),
        ({"trainer": Trainer(tp=4)}, "key/value heads 2 is not a multiple of tp 4"),
        ({"trainer": Trainer(dp=3, ep=3, etp=1)}, "experts do not split evenly over ep 3"),
        ({"engine": Engine(tp=3)}, r"engine\.tp is 3, but the model's 4 attention heads"),
        ({"engine": Engine(tp=12, ep=3)}, r"engine\.tp is 12"),
        ({"max_context": 10**6}, "longer than the"),
    ],
)
def test_what_would_fail_later_is_one_line_now(model: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_model(recipe(model, **sections))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "engine", "message"),
    [
        ("mixtral", {"tie_word_embeddings": True}, Engine(), "`tie_word_embeddings` is true, and SGLang's Mixtral"),
        ("gpt_oss", {}, Engine(tp=2, ep=2), r"engine\.ep is 2: SGLang loads a plain gpt-oss on one expert rank only"),
    ],
)
def test_what_servers_would_serve_wrongly_or_not_load_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], engine: Engine, message: str
) -> None:
    make_tiny_model(tmp_path / "model", family, 0, **fields)
    with pytest.raises(UserError, match=message):
        check_model(recipe(tmp_path / "model", engine=engine))


def test_servers_that_hold_fp8_take_whole_updates(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "plain", "qwen3_moe", 0, dtype="bfloat16")
    quantised, _ = fp8_copy(tmp_path / "plain", tmp_path / "fp8")
    check_model(recipe(quantised, algorithm=Algorithm(objective="sft")))
    check_model(recipe(quantised))
    for sections, message in (
        ({"weights": Weights(delta="auto")}, r"weights\.delta is auto, .* are FP8, .* set it to off"),
        ({"weights": Weights(transport="direct")}, r"weights\.transport is direct, .* set it to broadcast or disk or"),
        ({"engine": Engine(dtype="float32")}, r"engine\.dtype is float32, .* set it to bfloat16"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check_model(recipe(quantised, **sections))
        assert "\n" not in str(caught.value)
        check_model(recipe(quantised, algorithm=Algorithm(objective="sft"), **sections))


def test_servers_cannot_be_updated_in_mxfp4(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "plain", "gpt_oss", 0, dtype="bfloat16")
    quantised, _ = mxfp4_copy(tmp_path / "plain", tmp_path / "mxfp4")
    check_model(recipe(quantised, algorithm=Algorithm(objective="sft")))
    with pytest.raises(UserError, match=r"its weights are MXFP4\. .* cannot take its updates; .* plain copy"):
        check_model(recipe(quantised))


def with_reference(model: Path, reference: Path) -> Recipe:
    return Recipe(model=Model(path=str(model), reference=str(reference)), data=Data(train="t.jsonl"))


def test_a_reference_of_the_same_kind_is_accepted(model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "other", "qwen3_moe", 1)
    check_model(with_reference(model, tmp_path / "other"))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        ("absent", "no such|not a|does not exist"),
        ("family", "another kind of model than model.path: family qwen3 "),
        ("vocabulary", r"another kind of model than model.path: vocab_size 300 \(not \d+\)"),
        ("rope", r"another kind of model than model.path: rope_theta 5000.0 \(not"),
        ("tokenizer", "its tokenizer has another vocabulary"),
        ("tensor", "model.norm.weight"),
    ],
)
def test_a_reference_that_cannot_be_one_is_refused(model: Path, tmp_path: Path, plant: str, message: str) -> None:
    other = tmp_path / "reference"
    if plant == "family":
        make_tiny_model(other, "qwen3", 1)
    elif plant != "absent":
        shutil.copytree(model, other)
    if plant in ("vocabulary", "rope"):
        config = json.loads((other / "config.json").read_text())
        config |= {"vocab_size": 300} if plant == "vocabulary" else {"rope_theta": 5000.0}
        (other / "config.json").write_text(json.dumps(config))
    if plant == "tokenizer":
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        first, second, *_ = tokenizer["model"]["vocab"]
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    if plant == "tensor":
        from safetensors.torch import load_file, save_file

        tensors = load_file(other / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message) as caught:
        check_model(with_reference(model, other))
    assert "\n" not in str(caught.value)
