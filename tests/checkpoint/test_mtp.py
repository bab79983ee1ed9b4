"""Multi-token-prediction weights are never dropped or kept without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.hf_load import check_tensors
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model, random_weights
from tests.checkpoint.families import FAMILY_MODELS
from tests.pool.pool import WorkerPool

PREFIX = {"deepseek": "model.layers.5.", "glm": "model.layers.7."}


@pytest.fixture(params=list(PREFIX))
def with_mtp(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A checkpoint with one such layer, as DeepSeek-V3 and GLM-4.5 store it."""
    family, fields = FAMILY_MODELS[request.param]
    directory = tmp_path / "with"
    make_tiny_model(directory, family, 5, init_std=None, alphabet="ascii", num_nextn_predict_layers=1, **fields)
    spec = ModelSpec.from_hf(directory).with_mtp("keep")
    save_file(random_weights(spec, 5, None), directory / "model.safetensors", metadata={"format": "pt"})
    return request.param, directory


def test_without_a_word_it_is_refused(with_mtp: tuple[str, Path]) -> None:
    _, directory = with_mtp
    spec = ModelSpec.from_hf(directory)
    with SafetensorsDir(directory) as stored:
        with pytest.raises(UserError, match=r"holds \d+ tensors of 1 multi-token-prediction layers .* say what"):
            check_tensors(stored, spec)
        check_tensors(stored, spec.with_mtp("drop"))
        check_tensors(stored, spec.with_mtp("keep"))


def test_kept_tensors_are_in_the_map_and_each_is_needed(with_mtp: tuple[str, Path], tmp_path: Path) -> None:
    name, directory = with_mtp
    spec = ModelSpec.from_hf(directory).with_mtp("keep")
    kept = {t.name for t in parameter_map(spec).hf_tensors()} - {
        t.name for t in parameter_map(spec.with_mtp("drop")).hf_tensors()
    }
    assert {PREFIX[name] + part for part in ("enorm.weight", "eh_proj.weight", "shared_head.head.weight")} <= kept
    assert all(tensor.startswith(PREFIX[name]) for tensor in kept)
    copy = tmp_path / "less"
    shutil.copytree(directory, copy)
    tensors = load_file(directory / "model.safetensors")
    del tensors[PREFIX[name] + "hnorm.weight"]
    save_file(tensors, copy / "model.safetensors")
    with SafetensorsDir(copy) as stored, pytest.raises(UserError, match=rf"1 missing: {PREFIX[name]}hnorm\.weight"):
        check_tensors(stored, spec)


def test_a_layer_that_no_config_announces_is_an_extra_one(with_mtp: tuple[str, Path], tmp_path: Path) -> None:
    _, directory = with_mtp
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (directory / "config.json").write_text(json.dumps(config))
    with SafetensorsDir(directory) as stored, pytest.raises(UserError, match="unexpected"):
        check_tensors(stored, ModelSpec.from_hf(directory).with_mtp("drop"))


def test_what_is_written_after_dropping_has_no_such_layer(
    with_mtp: tuple[str, Path], pool: WorkerPool, tmp_path: Path
) -> None:
    name, directory = with_mtp
    pool.run("tests.checkpoint.jobs:convert", hf_dir=str(directory), out_dir=str(tmp_path / "out"), mtp="drop")
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() - after.keys() == {key for key in before if key.startswith(PREFIX[name])}
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
