"""Multi-token-prediction weights are never dropped or kept without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.hf_export import export_hf
from moe_asyncrl.checkpoint.hf_load import check_tensors, load_hf
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.features import MtpForm
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import NameSet, parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model, random_weights
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.formats.quantised import fp8_copy
from tests.checkpoint.models import changed_copy
from tests.checkpoint.trees import chunks_of
from tests.pool.pool import WorkerPool

PREFIX = {"deepseek": "model.layers.5.", "glm": "model.layers.7."}
FORMS = {
    "one by one": MtpForm(),
    "stacked": MtpForm(stacked=True),
    "without copies": MtpForm(copies=False),
    "stacked without copies": MtpForm(stacked=True, copies=False),
    "mtp.": MtpForm(own_prefix=True, copies=False),
    "mtp. stacked": MtpForm(own_prefix=True, stacked=True, copies=False),
}


def make(directory: Path, name: str, form: MtpForm = FORMS["one by one"]) -> Path:
    """A bfloat16 checkpoint with one such layer in the given form."""
    family, fields = FAMILY_MODELS[name]
    fields = fields | {"num_nextn_predict_layers": 1}
    make_tiny_model(directory, family, 5, init_std=None, alphabet="ascii", dtype="bfloat16", **fields)
    spec = replace(ModelSpec.from_hf(directory).with_mtp("keep"), mtp_form=form)
    tensors = random_weights(spec, 5, None)
    for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if PREFIX[name] + copy + ".weight" in tensors:
            tensors[PREFIX[name] + copy + ".weight"] = tensors[original + ".weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(params=list(PREFIX))
def with_mtp(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A checkpoint with one such layer, as DeepSeek-V3 and GLM-4.5 store it."""
    return request.param, make(tmp_path / "with", request.param)


def test_without_a_word_it_is_refused(with_mtp: tuple[str, Path]) -> None:
    _, directory = with_mtp
    spec = ModelSpec.from_hf(directory)
    with SafetensorsDir(directory) as stored:
        with pytest.raises(
            UserError, match=r"holds \d+ tensors of multi-token-prediction layers .behind layer \d+.; say what"
        ):
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


def through_a_model(spec: ModelSpec, source: Path, out: Path, **how: object) -> None:
    """Into module trees with Megatron-Core's names, since no trainer builds such layers yet, and out again."""
    chunks = chunks_of(spec, Layout(), 0, NameSet.LOCAL)
    load_hf(chunks, spec, Layout(), source, rank=0)
    export_hf(chunks, spec, Layout(), out, source_hf_dir=source, rank=0, **how)  # type: ignore[arg-type]


def same_files(a: Path, b: Path) -> bool:
    """Config and weights, byte for byte."""
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ("config.json", "model.safetensors"))


@pytest.mark.parametrize("name", list(PREFIX))
@pytest.mark.parametrize("form", list(FORMS))
def test_each_form_is_known_from_the_names_and_kept_as_it_is(form: str, name: str, tmp_path: Path) -> None:
    directory = make(tmp_path / "with", name, FORMS[form])
    spec = ModelSpec.from_hf(directory)
    assert spec.mtp_form == FORMS[form]
    with SafetensorsDir(directory) as stored:
        where = r"under `mtp\.`" if FORMS[form].own_prefix else "behind layer"
        with pytest.raises(UserError, match=rf"multi-token-prediction layers \({where}.*\); say what"):
            check_tensors(stored, spec)
    through_a_model(spec.with_mtp("keep"), directory, tmp_path / "kept")
    assert same_files(directory, tmp_path / "kept")
    through_a_model(spec.with_mtp("drop"), directory, tmp_path / "dropped")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "dropped"))
    own = "mtp." if FORMS[form].own_prefix else PREFIX[name]
    assert before.keys() - after.keys() == {key for key in before if key.startswith(own)} != set()
    assert all(torch.equal(value, before[key]) for key, value in after.items())


@pytest.mark.parametrize("name", list(PREFIX))
def test_stacked_experts_are_those_of_the_same_names(name: str, tmp_path: Path) -> None:
    """Gate over up, expert by expert: stacked by hand and one by one they are the same Megatron parameters."""
    each = make(tmp_path / "each", name)
    prefix = PREFIX[name] + "mlp.experts."

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        experts = ModelSpec.from_hf(each).num_experts
        parts = {
            which: [tensors.pop(f"{prefix}{e}.{which}_proj.weight") for e in range(experts)]
            for which in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        )
        tensors[prefix + "down_proj"] = torch.stack(parts["down"])

    stacked = changed_copy(each, tmp_path / "stacked", stack)
    found = []
    for directory in (each, stacked):
        spec = ModelSpec.from_hf(directory).with_mtp("keep")
        (chunk,) = chunks_of(spec, Layout(), 0, NameSet.LOCAL)
        load_hf([chunk], spec, Layout(), directory, rank=0)
        found.append(dict(chunk.named_parameters()))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())
    # The same bytes under two names of one shape: a transposed stack of square experts would not be told by its shape.
    planted = changed_copy(stacked, tmp_path / "planted", lambda t: swap_halves(t, prefix + "gate_up_proj"))
    spec = ModelSpec.from_hf(planted).with_mtp("keep")
    (chunk,) = chunks_of(spec, Layout(), 0, NameSet.LOCAL)
    load_hf([chunk], spec, Layout(), planted, rank=0)
    fc1 = "mtp.layers.0.transformer_layer.mlp.experts.local_experts.0.linear_fc1.weight"
    assert not torch.equal(dict(chunk.named_parameters())[fc1], found[0][fc1])


def swap_halves(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Gate and up change places."""
    tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, 1)


def lose_a_stack(tensors: dict[str, torch.Tensor], own: str) -> None:
    """Only one of the two stacks."""
    del tensors[own + "mlp.experts.down_proj"]


def mix_forms(tensors: dict[str, torch.Tensor], own: str) -> None:
    """One expert of a stack is there by itself, too."""
    tensors[own + "mlp.experts.1.up_proj.weight"] = tensors[own + "mlp.experts.gate_up_proj"][1, -1:].clone()


def lose_a_copy(tensors: dict[str, torch.Tensor], own: str) -> None:
    """A copy of the embedding without one of the output layer."""
    del tensors[own + "shared_head.head.weight"]


def two_places(tensors: dict[str, torch.Tensor], own: str) -> None:
    """The projection stands under `mtp.`."""
    tensors["mtp.fc.weight"] = tensors.pop(own + "eh_proj.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_stack, r"1 missing: model\.layers\.5\.mlp\.experts\.down_proj$"),
        (mix_forms, r"1 unexpected: model\.layers\.5\.mlp\.experts\.1\.up_proj\.weight$"),
        (lose_a_copy, r"1 missing: model\.layers\.5\.shared_head\.head\.weight$"),
        (two_places, r"1 missing: model\.layers\.5\.eh_proj\.weight; 1 unexpected: mtp\.fc\.weight$"),
    ],
)
def test_half_a_form_stops_with_the_names(change: Callable[..., None], message: str, tmp_path: Path) -> None:
    directory = make(tmp_path / "with", "deepseek", FORMS["stacked"])
    half = changed_copy(directory, tmp_path / "half", lambda tensors: change(tensors, PREFIX["deepseek"]))
    with SafetensorsDir(half) as stored, pytest.raises(UserError, match=message):
        check_tensors(stored, ModelSpec.from_hf(half).with_mtp("keep"))


def test_an_mtp_layer_of_a_family_that_announces_none_needs_a_word(tmp_path: Path) -> None:
    """As a Qwen3-MoE with `mtp.`: nothing knows its form, so it can only be dropped."""
    make_tiny_model(tmp_path / "m", "qwen3_moe", 1, num_hidden_layers=1, num_experts=2)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.fc.weight"] = torch.zeros(64, 128)

    directory = changed_copy(tmp_path / "m", tmp_path / "with", add)
    spec = ModelSpec.from_hf(directory)
    with SafetensorsDir(directory) as stored:
        with pytest.raises(UserError, match=r"1 tensors of multi-token-prediction layers .*say what"):
            check_tensors(stored, spec)
        with pytest.raises(UserError, match=r"1 unexpected: mtp\.fc\.weight"):
            check_tensors(stored, spec.with_mtp("keep"))
        check_tensors(stored, spec.with_mtp("drop"))


@pytest.mark.parametrize("form", ["one by one", "stacked", "mtp. stacked"])
def test_kept_layers_of_an_fp8_checkpoint_come_back_in_their_bytes(form: str, tmp_path: Path) -> None:
    directory, _ = fp8_copy(make(tmp_path / "plain", "deepseek", FORMS[form]), tmp_path / "fp8")
    spec = ModelSpec.from_hf(directory).with_mtp("keep")
    assert spec.mtp_form == FORMS[form]
    through_a_model(spec, directory, tmp_path / "out", form="fp8")
    assert same_files(directory, tmp_path / "out")
