"""Export and gathering between processes: bounded, together or not at all, never half a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_asyncrl.checkpoint.hf_export import export_hf
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import NameSet, parameter_map
from moe_asyncrl.models.spec import ModelSpec
from tests.checkpoint.models import changed_copy, make
from tests.checkpoint.trees import chunks_of
from tests.pool.pool import WorkerFailed, WorkerPool

EP2_PP2 = Layout(dp=2, ep=2, pp=2)
TP2 = Layout(tp=2)


@pytest.fixture(scope="module")
def moe4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of four layers."""
    return make(tmp_path_factory.mktemp("models"), "moe4")


@pytest.mark.parametrize(("layout", "max_bytes"), [(EP2_PP2, 30_000), (TP2, 1), (TP2, 10**9)], ids=str)
def test_gathering_is_the_same_on_every_rank_and_bounded(
    layout: Layout, max_bytes: int, pool: WorkerPool, moe4: Path
) -> None:
    """A limit below every tensor's size included: each parameter then travels alone."""
    tensors = load_file(moe4 / "model.safetensors")
    order = [t.name for t in parameter_map(ModelSpec.from_hf(moe4)).hf_tensors()]
    results = pool.run("tests.checkpoint.jobs:gather", layout=layout, hf_dir=str(moe4), max_bytes=max_bytes)
    largest_parameter = 2 * max(sum(t.numel for t in e.hf) for e in parameter_map(ModelSpec.from_hf(moe4)).entries)
    for names, largest, _ in results:
        assert names == order
        assert largest <= max(max_bytes, largest_parameter)
    assert [found is None for *_, found in results] == [False] + [True] * (layout.world_size - 1)
    for name, value in tensors.items():
        assert torch.equal(torch.from_numpy(results[0][2][name]), value.bfloat16().float())


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_leaves_stops_all_others_at_once(rank: int, pool: WorkerPool, moe4: Path) -> None:
    results = pool.run(
        "tests.checkpoint.jobs:gather", layout=EP2_PP2, hf_dir=str(moe4), max_bytes=20_000, close_on=rank, timeout_s=30
    )
    expected = [f"rank {rank} stopped while the weights were being gathered; see its log"] * 4
    expected[rank] = "left"
    assert results == expected


def test_a_missing_parameter_on_one_rank_stops_all_before_anything_moves(pool: WorkerPool, moe4: Path) -> None:
    results = pool.run("tests.checkpoint.jobs:gather", layout=EP2_PP2, hf_dir=str(moe4), max_bytes=10**9, drop_on=1)
    expected = ["preparing the weights failed on rank 1; see that rank's log"] * 4
    expected[1] = "rank 1: Megatron parameter decoder.layers.0.mlp.router.weight is missing"
    assert results == expected


def test_a_rank_that_dies_is_named_by_the_one_that_waits_for_it(pool: WorkerPool, moe4: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"exchange of weights .* with rank 1, 2, 3 failed or took over 20 s"):
        pool.run("tests.checkpoint.jobs:gather", layout=EP2_PP2, hf_dir=str(moe4), max_bytes=10**9, die_on=1)


def test_a_damaged_checkpoint_fails_on_every_rank(pool: WorkerPool, moe4: Path, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]

    copy = changed_copy(moe4, tmp_path / "gone", drop)
    errors = pool.run("tests.checkpoint.jobs:error_of_load", layout=EP2_PP2, hf_dir=str(copy), spec_dir=str(moe4))
    assert all("1 missing: model.norm.weight" in error for error in errors)


def test_a_full_disk_leaves_nothing_behind_and_no_rank_waiting(pool: WorkerPool, moe4: Path, tmp_path: Path) -> None:
    errors = pool.run(
        "tests.checkpoint.jobs:export_with_full_disk", layout=EP2_PP2, hf_dir=str(moe4), out_dir=str(tmp_path / "out")
    )
    assert errors[0] == "OSError: [Errno 28] No space left on device"
    assert all(e.startswith("UserError: rank 0 stopped while the weights were being gathered") for e in errors[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_not_taken_for_a_finished_one(pool: WorkerPool, moe4: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="the process died"):
        pool.run(
            "tests.checkpoint.jobs:export_killed", layout=Layout(), hf_dir=str(moe4), out_dir=str(tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith(".out.partial-")
    pool.run("tests.checkpoint.jobs:convert", hf_dir=str(moe4), out_dir=str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (moe4 / "model.safetensors").read_bytes()


def test_export_in_another_type_and_several_files(pool: WorkerPool, moe4: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changed = pool.run(
        "tests.checkpoint.jobs:bf16_in_fp32", layout=TP2, hf_dir=str(moe4), out_dir=str(tmp_path / "out")
    )
    assert min(changed) > 0.9
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert ModelSpec.from_hf(tmp_path / "out").torch_dtype == "bfloat16"
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    with SafetensorsDir(tmp_path / "out") as stored:
        assert len({tensor.file for tensor in stored.tensors.values()}) > 3
        for name, value in load_file(moe4 / "model.safetensors").items():
            assert torch.equal(stored.read(name), value.bfloat16())


def test_padding_rows_are_zero_inside_and_absent_outside(pool: WorkerPool, moe4: Path) -> None:
    assert ModelSpec.from_hf(moe4).vocab_size % 2 == 1
    (_, last) = pool.run("tests.checkpoint.jobs:last_embedding_row", layout=TP2, hf_dir=str(moe4))
    assert last == 0.0


def test_a_place_that_is_taken_or_a_source_that_is_none(tmp_path: Path, moe4: Path) -> None:
    spec = ModelSpec.from_hf(moe4)
    chunks = chunks_of(spec, Layout(), 0, NameSet.LOCAL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("precious")
    with pytest.raises(UserError, match="mine exists and is not an empty directory"):
        export_hf(chunks, spec, Layout(), tmp_path / "mine", source_hf_dir=moe4)
    with pytest.raises(UserError, match=r"has no config\.json to copy"):
        export_hf(chunks, spec, Layout(), tmp_path / "new", source_hf_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
