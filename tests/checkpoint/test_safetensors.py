"""A damaged checkpoint fails with one line that names file and tensor; what is written has the library's bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.hf_load import check_tensors, load_hf
from moe_asyncrl.checkpoint.ledger import Ledger
from moe_asyncrl.checkpoint.safetensors_dir import INDEX, SINGLE, SafetensorsDir
from moe_asyncrl.checkpoint.safetensors_writer import SafetensorsWriter
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import NameSet
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model, random_weights
from tests.checkpoint.models import changed_copy
from tests.checkpoint.trees import chunks_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE in one file."""
    directory = tmp_path_factory.mktemp("whole") / "m"
    make_tiny_model(directory, "qwen3_moe", 0, num_hidden_layers=2, num_experts=2)
    return directory


@pytest.fixture
def sharded(model: Path, tmp_path: Path) -> Path:
    """The same in several files with an index."""
    spec = ModelSpec.from_hf(model)
    tensors = load_file(model / SINGLE)
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    names = [HfTensor(name, tuple(value.shape)) for name, value in tensors.items()]
    with SafetensorsWriter(directory, names, torch.float32, 60_000) as writer:
        for name, value in reversed(tensors.items()):
            writer.write(name, value)
        writer.close()
    assert spec.total_parameters() == sum(value.numel() for value in tensors.values())
    return directory


def test_headers_tell_everything_and_slices_are_those_of_the_tensor(model: Path, sharded: Path) -> None:
    expected = load_file(model / SINGLE)
    for directory in (model, sharded):
        with SafetensorsDir(directory) as stored:
            assert {n: t.shape for n, t in stored.tensors.items()} == {n: tuple(v.shape) for n, v in expected.items()}
            for name, value in expected.items():
                assert torch.equal(stored.read(name), value)
            name = "model.layers.1.self_attn.o_proj.weight"
            assert torch.equal(stored.read(name, (slice(3, 9), slice(5, 6))), expected[name][3:9, 5:6])


@pytest.mark.parametrize("how", ["overlap", "gap"])
def test_tensors_that_do_not_fill_the_file_are_damage(how: str, tmp_path: Path) -> None:
    """Two with the same bytes would be converted without a word. The library refuses such a file too."""
    first, second = ([0, 16], [8, 24]) if how == "overlap" else ([0, 8], [16, 24])
    entries = {"a": (first, [4 if how == "overlap" else 2]), "b": (second, [4 if how == "overlap" else 2])}
    header = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": place} for name, (place, shape) in entries.items()}
    ).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(UserError, match="the bytes of tensor b do not follow others"):
        SafetensorsDir(tmp_path)
    with pytest.raises(Exception, match="offset"):
        load_file(tmp_path / SINGLE)


def test_shards_without_an_index_are_told_of(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(UserError, match=r"there is model-00001-of-\d+\.safetensors, but an index is missing"):
        SafetensorsDir(sharded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_writer_gives_the_bytes_of_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    values = {name: torch.randn(shape).to(dtype) for name, shape in (("b.ü", (3, 5)), ("a", (7,)), ("c", (2, 1, 2)))}
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    tensors = [HfTensor(name, tuple(value.shape)) for name, value in values.items()]
    with SafetensorsWriter(tmp_path, tensors, dtype, 10**9) as writer:
        for name, value in values.items():
            writer.write(name, value)
        writer.close()
    assert (tmp_path / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert not (tmp_path / INDEX).exists()


def test_the_index_is_what_transformers_reads(sharded: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * ModelSpec.from_hf(model).total_parameters()
    assert len(set(index["weight_map"].values())) > 3
    loaded, info = AutoModelForCausalLM.from_pretrained(sharded, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded.lm_head.weight, load_file(model / SINGLE)["lm_head.weight"])


def test_the_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path, [HfTensor("a", (2, 2)), HfTensor("b", (1,))], torch.float32, 10**9) as writer:
        with pytest.raises(ValueError, match=r"a is torch\.float32 \(4,\), announced torch\.float32 \(2, 2\)"):
            writer.write("a", torch.zeros(4))
        writer.write("b", torch.zeros(1))
        with pytest.raises(ValueError, match="never written"):
            writer.close()


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        SafetensorsDir(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor .*: only safetensors"):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1000, -1])
def test_a_truncated_file_is_named(sharded: Path, keep: int) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(UserError, match=rf"{victim.name} .*(not a complete|truncated)"):
        SafetensorsDir(sharded)


def test_a_damaged_header_is_named(model: Path, tmp_path: Path) -> None:
    data = bytearray((model / SINGLE).read_bytes())
    data[8:20] = b"\xff" * 12
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(UserError, match="damaged safetensors header"):
        SafetensorsDir(tmp_path)


def test_a_missing_file_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=rf"index\.json names {victim.name}, which does not exist"):
        SafetensorsDir(sharded)


def test_an_index_that_disagrees_with_its_files(sharded: Path) -> None:
    path = sharded / INDEX
    index = json.loads(path.read_text())
    first = "model.layers.0.input_layernorm.weight"
    ghost = {**index["weight_map"], "model.ghost.weight": index["weight_map"][first]}
    path.write_text(json.dumps({"weight_map": ghost}))
    with pytest.raises(UserError, match=r"files that do not hold them: model\.ghost\.weight \(model-"):
        SafetensorsDir(sharded)
    path.write_text(json.dumps({"weight_map": {k: v for k, v in index["weight_map"].items() if k != first}}))
    with pytest.raises(UserError, match=rf"holds tensor {first}, which .* does not name"):
        SafetensorsDir(sharded)
    path.write_text(json.dumps({"weight_map": {first: "../model.safetensors"}}))
    with pytest.raises(UserError, match="not a plain file name"):
        SafetensorsDir(sharded)
    path.write_text("{")
    with pytest.raises(UserError, match=r"index\.json is not valid JSON"):
        SafetensorsDir(sharded)


def test_stacked_experts_are_refused_with_every_name(model: Path, tmp_path: Path) -> None:
    """Never "success" with experts left random: stacked keys where one key an expert is expected."""

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for which in ("gate_proj", "up_proj", "down_proj"):
            one = [tensors.pop(f"model.layers.1.mlp.experts.{e}.{which}.weight") for e in range(2)]
            tensors[f"model.layers.1.mlp.experts.{which}"] = torch.stack(one)

    copy = changed_copy(model, tmp_path / "stacked", stack)
    with SafetensorsDir(copy) as stored, pytest.raises(UserError) as caught:
        check_tensors(stored, ModelSpec.from_hf(copy))
    text = str(caught.value)
    assert "6 missing: " in text
    assert "3 unexpected: model.layers.1.mlp.experts.down_proj, " in text
    for which in ("gate", "up", "down"):
        assert all(f"model.layers.1.mlp.experts.{e}.{which}_proj.weight" in text for e in range(2))


def test_a_wrong_shape_is_named(model: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"][:, :-1]

    copy = changed_copy(model, tmp_path / "cut", cut)
    with (
        SafetensorsDir(copy) as stored,
        pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate\.weight has shape \[2, 63\], .* needs \[2, 64\]"),
    ):
        check_tensors(stored, ModelSpec.from_hf(copy))


def test_a_type_without_a_meaning_here_is_refused(model: Path, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    with pytest.raises(UserError, match=r"model\.norm\.weight has type I8, only F32, BF16, F16"):
        SafetensorsDir(changed_copy(model, tmp_path / "int8", quantize))


def test_the_ledger_counts() -> None:
    ledger = Ledger("abc", what="tensors", where="here")
    for name in "aabd":
        ledger.enter(name)
    with pytest.raises(
        UserError, match="here: tensors do not match the model; 1 missing: c; 1 unexpected: d; 1 more than once: a"
    ):
        ledger.settle()


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_contradict_it(tmp_path: Path) -> None:
    spec = make_tiny_model(tmp_path / "m", "qwen3", 0, tie_embeddings=True, num_hidden_layers=1)

    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def contradict(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with SafetensorsDir(changed_copy(tmp_path / "m", tmp_path / "same", repeat)) as stored:
        assert check_tensors(stored, spec)
    (chunk,) = chunks_of(spec, Layout(), 0, NameSet.LOCAL)
    load_hf([chunk], spec, Layout(), tmp_path / "same", rank=0)
    assert torch.equal(
        chunk.get_parameter("embedding.word_embeddings.weight"),
        random_weights(spec, 0, 0.02)["model.embed_tokens.weight"],
    )
    with pytest.raises(UserError, match=r"ties the output layer to the embedding, but lm_head\.weight differs"):
        load_hf([chunk], spec, Layout(), changed_copy(tmp_path / "m", tmp_path / "other", contradict), rank=0)
