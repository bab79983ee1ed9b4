"""The parameter map under every layout: everything covered, nothing twice, there and back bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import Block
from moe_asyncrl.models.assemble import assemble, disassemble
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import NameSet, parameter_map
from moe_asyncrl.models.shards import check_layout, entry_owners, rank_shards
from moe_asyncrl.models.spec import ModelSpec
from tests.models.strategies import specs_and_layouts


def numbered(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """HF tensors in which every element of the model has a number of its own, from 1."""
    tensors, start = {}, 1
    for tensor in parameter_map(spec).hf_tensors():
        tensors[tensor.name] = torch.arange(start, start + tensor.numel).view(tensor.shape)
        start += tensor.numel
    return tensors


def local_parameters(spec: ModelSpec, layout: Layout, hf: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What each rank holds, by canonical name."""

    def read(block: Block) -> torch.Tensor:
        return hf[block.hf.name][block.hf_slices]

    ranks = []
    for rank in range(layout.world_size):
        held = {}
        for shard in rank_shards(spec, layout, rank):
            assert shard.entry.name not in held
            held[shard.entry.name] = torch.full(shard.shape, -1)
            assemble(shard, read, held[shard.entry.name])
        ranks.append(held)
    return ranks


@settings(max_examples=80, deadline=None)
@given(specs_and_layouts())
def test_owners_hold_everything_once_and_give_it_back(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    hf = numbered(spec)
    ranks = local_parameters(spec, layout, hf)
    back = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    taken = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    shards = [{s.entry.name: s for s in rank_shards(spec, layout, r)} for r in range(layout.world_size)]
    for entry in parameter_map(spec).entries:
        if entry.tied_copy:
            continue
        for rank in entry_owners(entry, spec, layout):
            shard = shards[rank][entry.name]
            for block, value in disassemble(shard, ranks[rank][entry.name]):
                back[block.hf.name][block.hf_slices] = value
                taken[block.hf.name][block.hf_slices] += 1
    for name, tensor in hf.items():
        assert torch.equal(back[name], tensor)
        assert bool((taken[name] == 1).all())


@settings(max_examples=60, deadline=None)
@given(specs_and_layouts())
def test_local_parameters_have_no_holes_but_padding_rows(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    for held in local_parameters(spec, layout, numbered(spec)):
        for name, value in held.items():
            holes = value == 0
            assert not bool((value < 0).any())
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                assert bool((holes.all(dim=1) | ~holes.any(dim=1)).all())
            else:
                assert not bool(holes.any())
            found = value[~holes]
            assert found.unique().numel() == found.numel()


@settings(max_examples=60, deadline=None)
@given(specs_and_layouts(families=("qwen3", "qwen3_moe", "llama")))
def test_fused_projections_are_what_megatron_slices(case: tuple[ModelSpec, Layout]) -> None:
    """An independent construction of Megatron-Core's fused tensors: build the whole one, cut it as its layers do."""
    spec, layout = case
    hf = numbered(spec)
    for rank, held in enumerate(local_parameters(spec, layout, hf)):
        at = layout.coordinates(rank)
        for name, value in held.items():
            if name.endswith("linear_qkv.weight"):
                prefix = f"model.layers.{name.split('.')[2]}.self_attn."
                q, k, v = (
                    hf[f"{prefix}{which}_proj.weight"].view(spec.num_kv_heads, -1, spec.hidden_size) for which in "qkv"
                )
                whole = torch.cat([q, k, v], dim=1).view(-1, spec.hidden_size)
                assert torch.equal(value, whole.chunk(layout.tp)[at.tp])
            elif name.endswith("linear_fc1.weight"):
                parts = name.split(".")
                middle = f"experts.{parts[6]}." if "local_experts" in name else ""
                prefix = f"model.layers.{parts[2]}.mlp.{middle}"
                count, index = (layout.etp, at.etp) if middle else (layout.tp, at.tp)
                gate, up = (hf[f"{prefix}{which}_proj.weight"].chunk(count)[index] for which in ("gate", "up"))
                assert torch.equal(value, torch.cat([gate, up]))


@given(specs_and_layouts())
@settings(max_examples=30, deadline=None)
def test_a_tied_output_layer_stands_only_where_there_is_no_embedding(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    for rank in range(layout.world_size):
        names = {shard.entry.name for shard in rank_shards(spec, layout, rank)}
        last, first = layout.coordinates(rank).pp == layout.pp - 1, layout.coordinates(rank).pp == 0
        assert ("embedding.word_embeddings.weight" in names) == first
        assert ("output_layer.weight" in names) == (last and not (spec.tie_embeddings and first))
    exported = [tensor.name for tensor in parameter_map(spec).hf_tensors()]
    assert len(set(exported)) == len(exported)
    assert ("lm_head.weight" in exported) == (not spec.tie_embeddings)


def test_both_name_sets_lead_to_the_same_entry() -> None:
    spec = small_spec()
    table = parameter_map(spec)
    names = {entry.name: entry.named(NameSet.TRANSFORMER_ENGINE) for entry in table.entries}
    assert names["decoder.layers.1.input_layernorm.weight"] == (
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    )
    assert names["decoder.layers.0.pre_mlp_layernorm.weight"] == "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert names["decoder.layers.1.pre_mlp_layernorm.weight"] == "decoder.layers.1.pre_mlp_layernorm.weight"
    assert names["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"] == (
        "decoder.layers.1.mlp.experts.linear_fc2.weight3"
    )
    for local, te in names.items():
        assert table.find(local) is table.find(te)
    with pytest.raises(UserError, match=r"mtp\.layers\.0\.weight is not in the parameter map"):
        table.find("mtp.layers.0.weight")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=3), "2 layers do not split evenly over 3"),
        (Layout(ep=3, dp=3), "4 experts do not split evenly over ep 3"),
        (Layout(tp=4, dp=1), "attention heads 6 is not a multiple of tp 4"),
        (Layout(tp=3), "tp 3 is not a multiple of 2 key/value heads"),
        (Layout(ep=2, etp=5, dp=10), "moe_intermediate_size 32 is not a multiple of etp 5"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(small_spec(), layout)


def small_spec() -> ModelSpec:
    """Two layers, the first one dense."""
    return ModelSpec.from_hf_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 48,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
            "vocab_size": 100,
        }
    )
