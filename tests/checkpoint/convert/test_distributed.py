"""A distributed checkpoint that is damaged or of another model is refused with all that is wrong with it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_asyncrl.checkpoint.convert.convert import hf_to_megatron, megatron_to_hf
from moe_asyncrl.checkpoint.convert.distcp import METADATA, DistcpDir, GlobalTensor, metadata_bytes
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model, random_weights
from tests.checkpoint.convert.support import contents
from tests.checkpoint.convert.test_keys import compare
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.models import changed_copy, make
from tests.pool.pool import WorkerPool

Tensors = dict[str, GlobalTensor]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of five layers."""
    root = tmp_path_factory.mktemp("models")
    hf_to_megatron(make(root, "moe5"), root / "out", workers=1)
    return root / "out"


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """One to damage."""
    shutil.copytree(converted, tmp_path / "copy")
    return tmp_path / "copy"


def refused(source: Path) -> str:
    """The error; nothing is left."""
    with pytest.raises(UserError) as caught:
        megatron_to_hf(source, source.parent / "out", workers=1)
    assert [p.name for p in source.parent.iterdir()] == [source.name]
    return str(caught.value)


def rewrite(directory: Path, change: Callable[[Tensors], None]) -> None:
    """Other metadata for the same files."""
    opened = DistcpDir.open(directory)
    tensors = dict(opened.tensors)
    change(tensors)
    (directory / METADATA).write_bytes(metadata_bytes(list(tensors.values()), opened.objects))


def test_a_file_that_is_missing_or_short(copy: Path) -> None:
    path = copy / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    assert refused(copy) == (
        f"{copy}: not a complete checkpoint: __0_0.distcp has {len(data) - 1000} bytes of {len(data)}"
    )
    path.unlink()
    assert refused(copy) == f"{copy}: not a complete checkpoint: __0_0.distcp is missing"


def test_damaged_metadata_and_other_formats(copy: Path) -> None:
    data = (copy / METADATA).read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"\x80\x02}."):
        (copy / METADATA).write_bytes(damaged)
        assert "is damaged or of another version of torch" in refused(copy)
    (copy / METADATA).unlink()
    assert "not a complete checkpoint: .metadata: No such file" in refused(copy)
    (copy / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "the checkpoint's format is 'zarr'; only `torch_dist` can be read" in refused(copy)
    (copy / "metadata.json").unlink()
    assert "has no metadata.json" in refused(copy)


def test_a_chunk_whose_bytes_are_not_as_announced(copy: Path) -> None:
    opened = DistcpDir.open(copy)
    slot = opened.tensors["decoder.layers.0.self_attention.linear_proj.weight"].chunks[0].slot
    with (copy / slot.file).open("r+b") as file:
        file.seek(slot.start + slot.length - 100)
        file.write(bytes(100))
    text = refused(copy)
    assert "decoder.layers.0.self_attention.linear_proj.weight at [0, 0]: cannot be read as a tensor" in text


def lose(tensors: Tensors) -> None:
    del tensors["decoder.layers.1.mlp.router.weight"], tensors["decoder.layers.4.self_attention.q_layernorm.weight"]
    key = "decoder.layers.1.mlp.gate.weight"
    tensors[key] = replace(tensors["decoder.layers.0.mlp.router.weight"], key=key)


def reshape(tensors: Tensors) -> None:
    for layer in (0, 3):
        key = f"decoder.layers.{layer}.mlp.router.weight"
        tensors[key] = replace(tensors[key], shape=(5, 96))


def shrink(tensors: Tensors) -> None:
    key = "output_layer.weight"
    tensors[key] = replace(tensors[key], shape=(268, 96))


def lose_a_chunk(tensors: Tensors) -> None:
    key = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
    tensors[key] = replace(tensors[key], chunks=tensors[key].chunks[:-1])


def chunk_twice(tensors: Tensors) -> None:
    key = "decoder.layers.1.self_attention.linear_proj.weight"
    chunk = tensors[key].chunks[0]
    tensors[key] = replace(tensors[key], chunks=(chunk, replace(chunk, offsets=(48, 0))))


CHANGES: list[tuple[Callable[[Tensors], None], list[str]]] = [
    (
        lose,
        [
            "2 missing: decoder.layers.1.mlp.router.weight, decoder.layers.4.self_attention.q_layernorm.weight",
            "1 unexpected: decoder.layers.1.mlp.gate.weight",
        ],
    ),
    (
        reshape,
        [
            "2 keys do not fit the model: decoder.layers.0.mlp.router.weight is [5, 96], the model needs [4, 96]",
            "decoder.layers.3.mlp.router.weight is [5, 96]",
        ],
    ),
    (shrink, ["output_layer.weight is [268, 96], the model needs [269, 96]"]),
    (lose_a_chunk, ["has 0 of the 3072 elements of model.layers.1.mlp.experts.3.down_proj.weight, rows 0 to 96"]),
    (chunk_twice, ["has 13824 of the 9216 elements of model.layers.1.self_attn.o_proj.weight", "missing or overlap"]),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_keys_that_are_not_the_models(change: Callable[[Tensors], None], said: list[str], copy: Path) -> None:
    rewrite(copy, change)
    text = refused(copy)
    assert all(part in text for part in said), text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_chunks_of_many_layers_and_experts_as_torch_writes_them(converted: Path, tmp_path: Path) -> None:
    """Each global tensor in one chunk, written by torch's own writer without Megatron-Core."""
    from torch.distributed import checkpoint as torch_checkpoint

    hf_dir = make(tmp_path, "mixtral")
    hf_to_megatron(hf_dir, tmp_path / "ours", layer_keys="stacked", workers=1)
    opened = DistcpDir.open(tmp_path / "ours")
    whole: dict[str, torch.Tensor] = {}
    for key, tensor in opened.tensors.items():
        whole[key] = torch.zeros(tensor.shape)
        for chunk in tensor.chunks:
            path, offset = opened.payload(tensor, chunk)
            found = torch.from_file(str(path), size=path.stat().st_size // 4, dtype=torch.float32)
            value = found[offset // 4 :][: math.prod(chunk.sizes)].view(chunk.sizes)
            at = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[key][at] = value
    opened.close()
    named_twice = [key for key in whole if key.endswith(".pre_mlp_layernorm.weight")]
    for key in named_twice:
        del whole[key]
    assert named_twice and whole["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape[:2] == (5, 6)
    torch_checkpoint.save(whole, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name in ("metadata.json", "common.pt"):
        shutil.copy(tmp_path / "ours" / name, tmp_path / "theirs")
    assert {len(t.chunks) for t in DistcpDir.open(tmp_path / "theirs").tensors.values()} == {1}
    megatron_to_hf(tmp_path / "theirs", tmp_path / "back", config=hf_dir, workers=2)
    assert contents(tmp_path / "back") == contents(hf_dir)


def two_names(tensors: Tensors) -> None:
    """The second name of a norm leads to other bytes."""
    keys = ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight")
    tensors[keys[0]] = replace(tensors[keys[0]], chunks=tensors[keys[1]].chunks)


def halves(tensors: Tensors) -> None:
    """Gate alone, as newer metadata of Megatron-Core have it."""
    key = "decoder.layers.2.mlp.linear_fc1.weight"
    tensors[key + "_w"] = replace(tensors.pop(key), key=key + "_w")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (two_names, "are names of one parameter, but are stored apart"),
        (halves, "was saved with `singleton_local_shards`"),
    ],
    ids=["two_names", "halves"],
)
def test_forms_that_cannot_be_read(change: Callable[[Tensors], None], said: str, copy: Path) -> None:
    rewrite(copy, change)
    assert said in refused(copy)


def test_a_checkpoint_that_carries_no_config_needs_one(copy: Path) -> None:
    shutil.rmtree(copy / "hf")
    assert "carries no hf/config.json: name an HF directory of the model with `--config HF_DIR`" in refused(copy)


def test_stacked_keys_are_not_for_models_of_two_kinds_of_layers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--layer-keys stacked: the model has dense and mixture-of-experts layers"):
        hf_to_megatron(make(tmp_path, "moe5"), tmp_path / "out", layer_keys="stacked")


def test_another_type_is_a_word_and_the_config_says_it(converted: Path, tmp_path: Path) -> None:
    """float32 to bfloat16, rounded as torch rounds; expert biases and such keep their own type elsewhere."""
    megatron_to_hf(converted, tmp_path / "out", dtype="bfloat16", workers=1)
    assert ModelSpec.from_hf(tmp_path / "out").torch_dtype == "bfloat16"
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(converted.parent / "moe5" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], value.bfloat16()), name


# ---- multi-token prediction

PREFIX = "model.layers.5."


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 with one such layer, whose copies of embedding and output layer are those of the model."""
    directory = tmp_path_factory.mktemp("mtp") / "with"
    family, fields = FAMILY_MODELS["deepseek"]
    make_tiny_model(directory, family, 5, init_std=None, alphabet="ascii", num_nextn_predict_layers=1, **fields)
    tensors = random_weights(ModelSpec.from_hf(directory).with_mtp("keep"), 5, None)
    tensors[PREFIX + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[PREFIX + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_mtp_layers_need_a_word_in_both_directions(with_mtp: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds \d+ tensors of multi-token-prediction layers.*`--mtp keep`"):
        hf_to_megatron(with_mtp, tmp_path / "none", workers=1)
    hf_to_megatron(with_mtp, tmp_path / "kept", mtp="keep", workers=1)
    keys = DistcpDir.open(tmp_path / "kept").tensors
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in keys
    assert keys["mtp.layers.0.eh_proj.weight"].shape == (96, 192)
    assert not any("mtp_copy" in key for key in keys)
    with pytest.raises(UserError, match=r"holds \d+ tensors of multi-token-prediction layers; say what becomes"):
        megatron_to_hf(tmp_path / "kept", tmp_path / "none", workers=1)
    megatron_to_hf(tmp_path / "kept", tmp_path / "back", mtp="keep", workers=1)
    assert contents(tmp_path / "back") == contents(with_mtp)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, ep=2), Layout(tp=2)], ids=str)
def test_mtp_layers_are_those_of_megatrons_own_block(
    layout: Layout, with_mtp: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    """The plan is what its model asks for; it loads them, and what it saves is the same HF directory."""
    spec = ModelSpec.from_hf(with_mtp).with_mtp("keep")
    compare(spec, pool.run("tests.checkpoint.convert.jobs:mtp_boxes", layout=layout, hf_dir=str(with_mtp)))
    hf_to_megatron(with_mtp, tmp_path / "ours", mtp="keep", workers=1)
    paths = {"checkpoint": str(tmp_path / "ours"), "saved": str(tmp_path / "theirs")}
    pool.run("tests.checkpoint.convert.jobs:mtp_through", layout=layout, hf_dir=str(with_mtp), **paths)
    megatron_to_hf(tmp_path / "theirs", tmp_path / "back", mtp="keep", config=with_mtp, workers=1)
    assert contents(tmp_path / "back") == contents(with_mtp)


@pytest.mark.parametrize("first", ["drop", "keep"])
def test_dropped_mtp_layers_are_nowhere(first: str, with_mtp: Path, tmp_path: Path) -> None:
    """In whichever direction they are dropped, the HF directory is that of the model without them."""
    hf_to_megatron(with_mtp, tmp_path / "a", mtp=first, workers=1)  # type: ignore[arg-type]
    megatron_to_hf(tmp_path / "a", tmp_path / "b", mtp="drop", workers=1)
    spec = ModelSpec.from_hf(tmp_path / "b")
    assert spec.mtp_layers == 0
    before, after = load_file(with_mtp / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert before.keys() - after.keys() == {name for name in before if name.startswith(PREFIX)}
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_copy_that_is_none_is_not_lost_silently(with_mtp: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[PREFIX + "shared_head.head.weight"][0, 0] += 1

    changed = changed_copy(with_mtp, tmp_path / "changed", change)
    with pytest.raises(UserError, match=r"shared_head\.head\.weight differs from lm_head\.weight in 1 elements"):
        hf_to_megatron(changed, tmp_path / "out", mtp="keep", workers=1)
