"""The converter remembers the form that weights were published in, and gives it back in the same bytes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.convert import convert
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.features import MtpForm
from moe_asyncrl.models.spec import ModelSpec
from tests.checkpoint.formats.quantised import fp8_copy, mxfp4_copy, same_bits
from tests.checkpoint.models import make
from tests.checkpoint.test_mtp import FORMS
from tests.checkpoint.test_mtp import make as make_with_mtp

ODD = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def contents(directory: Path) -> dict[str, bytes]:
    """Every file."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def extreme(tensors: dict[str, torch.Tensor]) -> None:
    """Scales under which bfloat16 does not tell codes apart, in the first and in the last row of blocks."""
    scales = tensors[ODD + "_scale_inv"]
    scales[0, 1], scales[-1, 0] = 0.0, 1e-44


def in_files(source: Path, target: Path) -> Path:
    """The same in three files with an index, scales apart from their weights."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, value) in enumerate(sorted(tensors.items())):
        files.setdefault(f"model-{number % 3 + 1:05d}-of-00003.safetensors", {})[name] = value
    for name, part in files.items():
        save_file(part, target / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": dict(sorted((tensor, name) for name, part in files.items() for tensor in part)),
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return target


@dataclass(frozen=True)
class Published:
    """An FP8 checkpoint in three files, what its tensors mean, and what it was converted to."""

    directory: Path
    meant: dict[str, torch.Tensor]
    megatron: Path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A DeepSeek-V3 with a kept multi-token-prediction layer of stacked experts, and scales that do not tell codes."""
    root = tmp_path_factory.mktemp("published")
    plain = make_with_mtp(root / "plain", "deepseek", FORMS["stacked"])
    one, _ = fp8_copy(plain, root / "one", change=extreme)
    directory = in_files(one, root / "fp8")
    convert.hf_to_megatron(directory, root / "megatron", mtp="keep", workers=1)
    with SafetensorsDir(directory) as stored:
        return Published(directory, {name: stored.read(name) for name in stored.tensors}, root / "megatron")


def test_fp8_comes_back_in_its_bytes(published: Published, tmp_path: Path) -> None:
    """Every file of the published directory, with the weights of three axes and the codes that were kept."""
    convert.megatron_to_hf(published.megatron, tmp_path / "out", mtp="keep", form="fp8", workers=1)
    assert contents(tmp_path / "out") == contents(published.directory)


def test_as_bfloat16_it_means_the_same_and_becomes_fp8_with_scales_that_are_named(
    published: Published, tmp_path: Path
) -> None:
    """Weights that were converted without scales, and a published checkpoint that has them."""
    convert.megatron_to_hf(published.megatron, tmp_path / "bf16", mtp="keep", workers=1)
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert ModelSpec.from_hf(tmp_path / "bf16").mtp_form == FORMS["stacked"]
    with SafetensorsDir(tmp_path / "bf16") as stored:
        assert stored.tensors.keys() == published.meant.keys()
        assert {t.form for t in stored.tensors.values()} == {"plain"}
        assert all(same_bits(stored.read(name), value) for name, value in published.meant.items())
    convert.hf_to_megatron(tmp_path / "bf16", tmp_path / "megatron", mtp="keep", workers=1)
    again = {"mtp": "keep", "form": "fp8", "workers": 1}
    with pytest.raises(UserError, match="was not made from FP8 weights"):
        convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "out", **again)  # type: ignore[arg-type]
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "out", config=published.directory, **again)  # type: ignore[arg-type]
    with SafetensorsDir(tmp_path / "out") as found, SafetensorsDir(published.directory) as before:
        assert found.raw.tensors.keys() == before.raw.tensors.keys()
        assert all(same_bits(found.raw.read(name), before.raw.read(name)) for name in before.raw.tensors)
    assert (tmp_path / "out" / "config.json").read_bytes() == (published.directory / "config.json").read_bytes()


def test_dropped_layers_are_gone_with_their_scales(published: Published, tmp_path: Path) -> None:
    convert.megatron_to_hf(published.megatron, tmp_path / "out", mtp="drop", form="fp8", workers=1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with SafetensorsDir(tmp_path / "out") as found, SafetensorsDir(published.directory) as before:
        gone = before.raw.tensors.keys() - found.raw.tensors.keys()
        assert gone == {name for name in before.raw.tensors if name.startswith("model.layers.5.")}
        assert all(same_bits(found.raw.read(name), before.raw.read(name)) for name in found.raw.tensors)


def test_mxfp4_becomes_the_bfloat16_that_transformers_makes_of_it(tmp_path: Path) -> None:
    source, meant = mxfp4_copy(make(tmp_path / "plain", "gpt-oss", "bfloat16"), tmp_path / "mxfp4")
    convert.hf_to_megatron(source, tmp_path / "megatron", workers=1)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "out", workers=1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == meant.keys()
    assert all(same_bits(value, meant[name]) for name, value in found.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("form", ["without copies", "mtp. stacked"])
def test_every_form_of_kept_layers_comes_back(form: str, tmp_path: Path) -> None:
    source = make_with_mtp(tmp_path / "m", "glm", FORMS[form])
    assert ModelSpec.from_hf(source).mtp_form != MtpForm()
    convert.hf_to_megatron(source, tmp_path / "megatron", mtp="keep", workers=1)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "out", mtp="keep", workers=1)
    assert contents(tmp_path / "out") == contents(source)
