"""Local numbers become global ones, in either name set; what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.checkpoint.megatron_names import global_name, global_parameters
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import NameSet
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.tiny import make_tiny_model
from tests.checkpoint.trees import Tree, chunks_of
from tests.models.strategies import specs_and_layouts


def test_layers_and_experts_are_counted_over_the_whole_model() -> None:
    layers = range(6, 9)
    assert global_name("decoder.layers.1.mlp.router.weight", layers, 4) == "decoder.layers.7.mlp.router.weight"
    assert global_name("module.module.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", layers, 4) == (
        "decoder.layers.6.mlp.experts.local_experts.7.linear_fc1.weight"
    )
    assert global_name("decoder.layers.2.mlp.experts.linear_fc2.weight11", layers, 16) == (
        "decoder.layers.8.mlp.experts.linear_fc2.weight27"
    )
    assert global_name("decoder.layers.0.mlp.linear_fc1.weight", layers, 4) == "decoder.layers.6.mlp.linear_fc1.weight"
    assert global_name("embedding.word_embeddings.weight", layers, 4) == "embedding.word_embeddings.weight"
    with pytest.raises(UserError, match=r"decoder\.layers\.3\..* is outside the 3 layers"):
        global_name("decoder.layers.3.mlp.router.weight", layers, 0)


@settings(max_examples=40, deadline=None)
@given(specs_and_layouts(), st.sampled_from(list(NameSet)), st.sampled_from(["", "module.", "module.module."]))
def test_every_rank_finds_its_parameters(case: tuple[ModelSpec, Layout], names: NameSet, prefix: str) -> None:
    spec, layout = case
    for rank in {0, layout.world_size // 2, layout.world_size - 1}:
        found = global_parameters(chunks_of(spec, layout, rank, names, prefix), spec, layout, rank)
        assert list(found) == [shard.entry.name for shard in rank_shards(spec, layout, rank)]


@pytest.mark.parametrize("rank", range(4))
def test_transformer_engine_names_load_the_same_values(rank: int, tmp_path: Path) -> None:
    spec = make_tiny_model(tmp_path / "m", "qwen3_moe", 0, init_std=None, mlp_only_layers=[1])
    layout = Layout(dp=2, ep=2, pp=2)
    loaded = []
    for names in NameSet:
        chunks = chunks_of(spec, layout, rank, names)
        load_hf(chunks, spec, layout, tmp_path / "m", rank=rank)
        loaded.append(global_parameters(chunks, spec, layout, rank))
    local, te = loaded
    assert local.keys() == te.keys()
    for name, value in local.items():
        assert torch.equal(value, te[name])


def test_missing_extra_and_misshapen_parameters_are_named(tmp_path: Path) -> None:
    spec = make_tiny_model(tmp_path / "m", "qwen3", 0, num_hidden_layers=2)
    layout = Layout()
    (whole,) = chunks_of(spec, layout, 0, NameSet.LOCAL)
    shapes = {name: tuple(value.shape) for name, value in whole.named_parameters()}
    gone = "decoder.layers.1.mlp.linear_fc2.weight"
    with pytest.raises(UserError, match=rf"rank 0 of layout single: .*1 missing: {gone}"):
        global_parameters([Tree((n, s) for n, s in shapes.items() if n != gone)], spec, layout, 0)
    with pytest.raises(UserError, match=r"mtp\.layers\.0\.enorm\.weight is not in the parameter map"):
        global_parameters([Tree([*shapes.items(), ("mtp.layers.0.enorm.weight", (64,))])], spec, layout, 0)
    both = ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", (64,))
    with pytest.raises(UserError, match=r"1 more than once: decoder\.layers\.0\.input_layernorm\.weight"):
        global_parameters([Tree([*shapes.items(), both])], spec, layout, 0)
    with pytest.raises(UserError, match=rf"{gone} has shape \[64, 64\], the layout needs \[64, 128\]"):
        global_parameters([Tree({**shapes, gone: (64, 64)}.items())], spec, layout, 0)
    with pytest.raises(UserError, match="has 2 model chunks, layout single says 1"):
        global_parameters([whole, whole], spec, layout, 0)
