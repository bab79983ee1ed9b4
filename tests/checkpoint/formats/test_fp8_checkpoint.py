"""FP8 checkpoints read as bfloat16 ones, and what did not change is written in its published bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.formats import fp8
from moe_asyncrl.checkpoint.formats.encode import Encoder, Fp8, Plain
from moe_asyncrl.checkpoint.formats.scales import LIST, SCALES, CheckpointScales, ScaleFolder, collect
from moe_asyncrl.checkpoint.hf_export import check_form
from moe_asyncrl.checkpoint.hf_load import check_tensors
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.checkpoint.safetensors_writer import SafetensorsWriter
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from tests.checkpoint.formats.quantised import fp8_copy, quantise_config, same_bits
from tests.checkpoint.models import changed_copy

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
ODD = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeepSeek-V3, of sizes that blocks do not divide."""
    directory = tmp_path_factory.mktemp("plain") / "m"
    make_tiny_model(directory, "deepseek_v3", 1, dtype="bfloat16", num_hidden_layers=2, hidden_size=72)
    return directory


@pytest.fixture(scope="module")
def published(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """The same with FP8 weights in blocks of 16x16, and what its tensors mean."""
    return fp8_copy(plain, tmp_path_factory.mktemp("fp8") / "m")


def test_it_lists_and_reads_as_if_it_were_bfloat16(published: tuple[Path, Tensors]) -> None:
    directory, meant = published
    with SafetensorsDir(directory) as stored:
        assert {n: (t.shape, t.dtype) for n, t in stored.tensors.items()} == {
            n: (tuple(v.shape), v.dtype) for n, v in meant.items()
        }
        assert {n for n, t in stored.tensors.items() if t.form == "fp8"} == {
            n.removesuffix("_scale_inv") for n in stored.raw.tensors if n.endswith("_scale_inv")
        }
        assert stored.tensors[ODD].form == "fp8" and any(n % 16 for n in stored.tensors[ODD].shape)
        assert stored.tensors[BIAS].dtype == torch.float32
        for name, value in meant.items():
            assert same_bits(stored.read(name), value)
        check_tensors(stored, ModelSpec.from_hf(directory))


def test_rectangles_with_steps(published: tuple[Path, Tensors]) -> None:
    directory, meant = published
    generator = torch.Generator().manual_seed(2)
    with SafetensorsDir(directory) as stored:
        for name in (DOWN, ODD):
            for _ in range(40):
                slices = []
                for n in meant[name].shape:
                    a, b = sorted(torch.randperm(n + 1, generator=generator)[:2].tolist())
                    slices.append(slice(a, b, int(torch.randint(1, 4, (), generator=generator))))
                assert same_bits(stored.read(name, tuple(slices)), meant[name][tuple(slices)])


def test_the_config_alone_tells_a_bfloat16_model(published: tuple[Path, Tensors], tmp_path: Path) -> None:
    """MiniMax-M2 and others say nothing of a type beside `quantization_config`."""
    config = json.loads((published[0] / "config.json").read_text())
    del config["torch_dtype"]
    assert ModelSpec.from_hf_config(config).torch_dtype == "bfloat16"
    minimax = {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]}
    config["quantization_config"] |= minimax
    assert ModelSpec.from_hf_config(config) == ModelSpec.from_hf(published[0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scales", lambda t: t.pop(DOWN + "_scale_inv"), rf"{DOWN} is FP8, but {DOWN}_scale_inv is missing"),
        ("weights", lambda t: t.pop(DOWN), rf"{DOWN}_scale_inv holds scales, but its weights are missing"),
        ("bf16", lambda t: t.update({DOWN: t[DOWN].bfloat16()}), rf"{DOWN}_scale_inv holds scales, but"),
        (
            "shape",
            lambda t: t.update({DOWN + "_scale_inv": t[DOWN + "_scale_inv"][:-1].clone()}),
            rf"{DOWN}_scale_inv is float32 \[4, 2\]; blocks of 16x16 of {DOWN} \[72, 32\] need .* \[5, 2\]",
        ),
        ("bytes", lambda t: t.update({BIAS: t[BIAS].view(torch.uint8)}), rf"{BIAS} has type U8, only F32"),
    ],
)
def test_what_is_incomplete_is_named(
    name: str, change: object, message: str, published: tuple[Path, Tensors], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        SafetensorsDir(changed_copy(published[0], tmp_path / name, change))  # type: ignore[arg-type]


def test_config_and_files_must_agree(published: tuple[Path, Tensors], plain: Path, tmp_path: Path) -> None:
    copy = changed_copy(published[0], tmp_path / "silent", lambda tensors: None)
    quantise_config(copy, None)
    with pytest.raises(UserError, match=r"is FP8, but config\.json has no `quantization_config`"):
        SafetensorsDir(copy)
    other = changed_copy(plain, tmp_path / "loud", lambda tensors: None)
    quantise_config(other, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(UserError, match=r"config\.json says fp8 weights, the files hold plain ones"):
        SafetensorsDir(other)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_named_with_its_place(
    byte: int, published: tuple[Path, Tensors], tmp_path: Path
) -> None:
    def plant(tensors: Tensors) -> None:
        tensors[DOWN].view(torch.uint8)[33, 20] = byte

    with SafetensorsDir(changed_copy(published[0], tmp_path / "nan", plant)) as stored:
        stored.read(DOWN, (slice(0, 33), slice(0, 32)))
        with pytest.raises(UserError, match=rf"tensor {DOWN} is nan at \[33, 20\] once dequantised"):
            stored.read(DOWN, (slice(17, 72), slice(4, 32)))


def write(directory: Path, encoder: Encoder, values: Tensors, out: Path) -> Path:
    """A one-file checkpoint of `values` in the encoder's form, with the config to go with it."""
    out.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(encoder.config(config), indent=2) + "\n")
    own = {torch.float32: "float32", torch.bfloat16: None}
    tensors = [HfTensor(n, tuple(v.shape), own[v.dtype]) for n, v in values.items()]
    with SafetensorsWriter(out, encoder.stored_tensors(tensors), torch.bfloat16, 10**9) as writer:
        for name, value in values.items():
            for stored, part in encoder.encode(name, value).items():
                writer.write(stored, part)
        writer.close()
    return out


def files(directory: Path) -> dict[str, bytes]:
    """Config and weights."""
    return {name: (directory / name).read_bytes() for name in ("config.json", "model.safetensors")}


def extreme(tensors: Tensors) -> None:
    """Scales that bfloat16 does not tell codes apart under: zero, negative, subnormal; in corner blocks too."""
    scales = tensors[DOWN + "_scale_inv"]
    scales[0, 0], scales[1, 1], scales[4, 1], scales[2, 0], scales[4, 0] = 0.0, 1e-43, -1e-40, -0.01, -0.0
    tensors[ODD + "_scale_inv"] = (tensors[ODD + "_scale_inv"]).bfloat16()


def test_unchanged_weights_come_back_in_their_published_bytes(plain: Path, tmp_path: Path) -> None:
    """From the checkpoint's own scales and from the folder beside other weights; as plain ones they mean the same."""
    directory, _ = fp8_copy(plain, tmp_path / "m", change=extreme)
    with SafetensorsDir(directory) as stored:
        values = {name: stored.read(name) for name in stored.tensors}
        collect(stored, tmp_path / "scales")
        write(directory, Fp8(CheckpointScales(stored)), values, tmp_path / "a")
        write(directory, Plain(), values, tmp_path / "plain")
    write(directory, Fp8(ScaleFolder(tmp_path / "scales")), values, tmp_path / "b")
    assert files(tmp_path / "a") == files(directory) == files(tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    with SafetensorsDir(tmp_path / "plain") as stored:
        assert {t.form for t in stored.tensors.values()} == {"plain"}
        assert all(same_bits(stored.read(name), value) for name, value in values.items())
    kept = load_file(tmp_path / "scales" / SCALES)
    assert kept[DOWN + "_kept_blocks"].tolist() == [[0, 0], [1, 1], [4, 0], [4, 1]]
    assert {name for name in kept if "_kept_" in name} == {DOWN + "_kept_blocks", DOWN + "_kept_codes"}


def test_a_changed_block_is_written_anew_and_no_other(plain: Path, tmp_path: Path) -> None:
    directory, _ = fp8_copy(plain, tmp_path / "m", change=extreme)
    with SafetensorsDir(directory) as stored:
        values = {name: stored.read(name) for name in stored.tensors}
        for row, column in ((0, 0), (40, 20)):
            values[DOWN][row, column] = 3.0
        write(directory, Fp8(CheckpointScales(stored)), values, tmp_path / "out")
        before = {name: stored.raw.read(name) for name in stored.raw.tensors}
    with SafetensorsDir(tmp_path / "out") as stored:
        after = {name: stored.raw.read(name) for name in stored.raw.tensors}
        assert float(stored.read(DOWN)[0, 0]) == pytest.approx(3.0)
    assert before.keys() == after.keys()
    assert {n for n in before if not same_bits(before[n], after[n])} == {DOWN, DOWN + "_scale_inv"}
    scales = [t[DOWN + "_scale_inv"] for t in (before, after)]
    assert (scales[0].view(torch.int32) != scales[1].view(torch.int32)).nonzero().tolist() == [[0, 0], [2, 1]]
    assert scales[1][2, 1] == torch.tensor(3.0) / 448
    differs = before[DOWN].view(torch.uint8) != after[DOWN].view(torch.uint8)
    differs[0:16, 0:16] = differs[32:48, 16:32] = False
    assert not bool(differs.any())


def test_what_fp8_cannot_hold_or_is_not_fp8_is_refused(
    published: tuple[Path, Tensors], plain: Path, tmp_path: Path
) -> None:
    with SafetensorsDir(published[0]) as stored:
        encoder = Fp8(CheckpointScales(stored))
        value = stored.read(DOWN)
        value[5, 6] = float("nan")
        with pytest.raises(UserError, match=rf"{DOWN} is nan at \[5, 6\], which FP8 cannot hold"):
            encoder.encode(DOWN, value)
        with pytest.raises(UserError, match=rf"{DOWN} has shape \[72, 33\], the published FP8 weight \[72, 32\]"):
            encoder.stored_tensors([HfTensor(DOWN, (72, 33))])
    check_form("fp8", published[0])
    check_form("plain", plain)
    with pytest.raises(UserError, match="is not an FP8 checkpoint"):
        check_form("fp8", plain)


def test_a_folder_of_scales_that_is_not_whole(published: tuple[Path, Tensors], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder of published scales"):
        ScaleFolder(tmp_path / "none")
    with SafetensorsDir(published[0]) as stored:
        collect(stored, tmp_path / "scales")
    tensors = load_file(tmp_path / "scales" / SCALES)
    del tensors[DOWN + "_scale_inv"]
    save_file(tensors, tmp_path / "scales" / SCALES)
    with pytest.raises(UserError, match=rf"the scales of 1 weights are missing: {DOWN}"):
        ScaleFolder(tmp_path / "scales")
    (tmp_path / "scales" / LIST).unlink()
    with pytest.raises(UserError, match="not a folder of published scales"):
        ScaleFolder(tmp_path / "scales")


def test_transformers_reads_what_is_written_anew(plain: Path, tmp_path: Path) -> None:
    """Its own dequantisation of our files gives our values, for whole blocks, which are all that it knows."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(7)
    value = torch.randn(256, 128, generator=generator).bfloat16()
    found = fp8.quantize(value, (128, 128))
    theirs = Fp8Dequantize(None)._dequantize_one(found.codes, found.scales, torch.bfloat16)
    assert same_bits(theirs, fp8.dequantize(found.codes, found.scales, (128, 128)))
    assert float((theirs.float() - value.float()).abs().max()) < float(value.abs().max()) / 15
