"""Megatron-Core loads what is converted, bit for bit as `load_hf` does, and what it saves becomes the same HF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_asyncrl.checkpoint.convert import convert
from moe_asyncrl.checkpoint.convert.convert import hf_to_megatron, megatron_to_hf
from moe_asyncrl.checkpoint.convert.distcp import DistcpDir
from moe_asyncrl.checkpoint.convert.keys import LayerKeys
from moe_asyncrl.checkpoint.convert.to_hf import plan_to_hf
from moe_asyncrl.checkpoint.convert.to_megatron import plan_to_megatron
from moe_asyncrl.checkpoint.safetensors_header import INDEX
from moe_asyncrl.models.layout import Layout
from tests.checkpoint.convert.support import contents, layouts
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.models import make
from tests.pool.pool import WorkerPool

EXCHANGE = "tests.checkpoint.convert.jobs:exchange"
# Two layouts a family, so that each layout has several families; `soak.py` has all of them.
CASES = [
    (name, layout, "bfloat16" if number % 2 else "float32")
    for number, name in enumerate(FAMILY_MODELS)
    for layout in (layouts(name)[number % 4], layouts(name)[-1])
]
CASES.append(("moe4tied", Layout(pp=4), "bfloat16"))  # the last stage has a copy of the embedding, two have none


def check(pool: WorkerPool, name: str, layout: Layout, dtype: str, place: Path) -> None:
    """HF to Megatron, loaded there; another model saved there, to HF; each step bit for bit."""
    hf_dir = make(place, name, dtype)
    hf_to_megatron(hf_dir, place / "converted", workers=1)
    saved = place / "saved"
    unlike = pool.run(
        EXCHANGE, layout=layout, hf_dir=str(hf_dir), checkpoint=str(place / "converted"), saved=str(saved), dtype=dtype
    )
    assert unlike == [[]] * layout.world_size
    for checkpoint, config in ((place / "converted", None), (saved, hf_dir)):
        out = place / f"{checkpoint.name}-hf"
        megatron_to_hf(checkpoint, out, config=config, workers=1)
        if dtype == "float32" or checkpoint != saved or not widened(hf_dir):
            assert contents(out) == contents(hf_dir), checkpoint


def widened(hf_dir: Path) -> bool:
    """Whether some weights are stored wider than the model computes in: a model that was saved has them rounded."""
    return "minimax" in hf_dir.name


@pytest.mark.parametrize(("name", "layout", "dtype"), CASES, ids=[f"{n}-{x}-{d}" for n, x, d in CASES])
def test_both_ways_on_every_family(name: str, layout: Layout, dtype: str, pool: WorkerPool, tmp_path: Path) -> None:
    check(pool, name, layout, dtype, tmp_path)


STOCK: list[tuple[str, Layout, int, LayerKeys]] = [
    ("mixtral", Layout(), 384, "stacked"),
    ("mixtral", Layout(tp=2, ep=2), 384, "separate"),
    ("tied", Layout(tp=2), 512, "stacked"),
]


@pytest.mark.parametrize(("name", "layout", "vocab", "layers"), STOCK, ids=[f"{n}-{x}-{k}" for n, x, _, k in STOCK])
def test_a_model_of_plain_megatron_code_with_a_padded_vocabulary(
    name: str, layout: Layout, vocab: int, layers: LayerKeys, pool: WorkerPool, tmp_path: Path
) -> None:
    hf_dir = make(tmp_path, name)
    hf_to_megatron(hf_dir, tmp_path / "converted", layer_keys=layers, workers=1)
    found: list[dict[str, Any]] = pool.run(
        "tests.checkpoint.convert.jobs:stock_exchange",
        layout=layout,
        hf_dir=str(hf_dir),
        checkpoint=str(tmp_path / "converted"),
        saved=str(tmp_path / "saved"),
        vocab_size=vocab,
        layer_frequency=layers == "stacked",
    )
    for rank in found:
        assert rank["wrong"] == [] and rank["seen"] > 20
        assert rank["padding"] == 0.0
    # The padding was filled with garbage before the save: it must not come out.
    megatron_to_hf(tmp_path / "saved", tmp_path / "out", config=hf_dir, workers=1)
    assert contents(tmp_path / "out") == contents(hf_dir)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(pp=2, stage_layers=(2, 3))], ids=str)
def test_a_checkpoint_of_the_trainer_is_a_source(layout: Layout, pool: WorkerPool, tmp_path: Path) -> None:
    """Its weights; what it holds of the optimizer is passed over."""
    hf_dir = make(tmp_path, "moe5")
    job = "tests.checkpoint.convert.jobs:train_checkpoint"
    folder, *_ = pool.run(job, layout=layout, hf_dir=str(hf_dir), checkpoints=str(tmp_path / "checkpoints"))
    assert any(key.startswith("optimizer.") for key in DistcpDir.open(Path(folder)).tensors)
    megatron_to_hf(Path(folder), tmp_path / "out", config=hf_dir, workers=1)
    assert contents(tmp_path / "out") == contents(hf_dir)


def test_a_wrong_value_is_seen(pool: WorkerPool, tmp_path: Path) -> None:
    """Two experts exchanged inside the converted file: the comparison of the other tests finds it."""
    hf_dir = make(tmp_path, "moe5")
    hf_to_megatron(hf_dir, tmp_path / "converted", workers=1)
    path = tmp_path / "converted" / "__0_0.distcp"
    data = path.read_bytes()
    opened = DistcpDir.open(tmp_path / "converted")
    tensor = opened.tensors["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"]
    (_, a), (_, b) = (opened.payload(tensor, chunk) for chunk in tensor.chunks[:2])
    opened.close()
    size = 4 * 96 * 32
    swapped = bytearray(data)
    swapped[a : a + size], swapped[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(swapped)
    (unlike,) = pool.run(
        EXCHANGE, layout=Layout(), hf_dir=str(hf_dir), checkpoint=str(tmp_path / "converted"), saved=None
    )
    assert unlike == [f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc2.weight" for e in (0, 1)]


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek"])
def test_many_files_and_small_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, units and files far smaller than the tensors; the files that come back are those that went in."""
    monkeypatch.setattr(
        convert, "plan_to_megatron", lambda *a: plan_to_megatron(*a, chunk_bytes=5000, unit_bytes=60_000)
    )
    monkeypatch.setattr(convert, "plan_to_hf", lambda *a, **k: plan_to_hf(*a, **k, unit_bytes=60_000, slab_bytes=5000))
    one, many = make(tmp_path, name), tmp_path / "many"
    hf_to_megatron(one, tmp_path / "first", workers=2)
    assert len(list((tmp_path / "first").glob("__*.distcp"))) > 20
    megatron_to_hf(tmp_path / "first", many, shard_bytes=200_000, workers=2)
    assert len(list(many.glob("*.safetensors"))) > 3 and (many / INDEX).is_file()
    # From many files the index is carried: the same files come back.
    hf_to_megatron(many, tmp_path / "second", workers=2)
    megatron_to_hf(tmp_path / "second", tmp_path / "again", workers=2)
    assert contents(tmp_path / "again") == contents(many)
    monkeypatch.setattr(convert, "_weight_map", lambda carried: None)
    megatron_to_hf(tmp_path / "second", tmp_path / "one", workers=2)
    assert contents(tmp_path / "one") == contents(one)
