"""A checkpoint computes in Megatron-Core what it does in transformers, on every layout, and comes out as it went in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_asyncrl.models.layout import Layout
from tests.checkpoint.models import changed_copy, relative, transformers_logits
from tests.checkpoint.parity import CONVERT, TOLERANCE, check_conversion
from tests.pool.pool import WorkerPool

SINGLE = Layout()
EP2 = Layout(dp=2, ep=2)
PP2 = Layout(pp=2)
TP2 = Layout(tp=2)
EP2_PP2 = Layout(dp=2, ep=2, pp=2)

CASES = [
    ("moe5", SINGLE),
    ("moe5", EP2),
    ("moe5", TP2),
    ("moe4", PP2),
    ("moe4", EP2_PP2),
    ("moe4", Layout(tp=2, ep=2)),
    ("moe4", Layout(tp=2, ep=2, etp=2, dp=2)),
    ("moe4", Layout(pp=2, vpp=2)),
    ("moe4tied", EP2_PP2),
    ("tied", SINGLE),
    ("tied", PP2),
    ("tied", TP2),
    ("tied", Layout(pp=4)),
]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_logits_equal_transformers_and_the_export_is_the_checkpoint(
    name: str, layout: Layout, pool: WorkerPool, models: Any, tmp_path: Path
) -> None:
    check_conversion(pool, layout, *models(name), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def swap_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Experts 0 and 1 of layer 1 change places."""
    for which in ("gate", "up", "down"):
        a, b = (f"model.layers.1.mlp.experts.{e}.{which}_proj.weight" for e in (0, 1))
        tensors[a], tensors[b] = tensors[b], tensors[a]


def swap_gate_and_up(tensors: dict[str, torch.Tensor]) -> None:
    """In one expert of layer 1."""
    a, b = (f"model.layers.1.mlp.experts.0.{which}_proj.weight" for which in ("gate", "up"))
    tensors[a], tensors[b] = tensors[b], tensors[a]


def transpose_output(tensors: dict[str, torch.Tensor]) -> None:
    """The attention output of layer 3: square, so that its shape does not tell."""
    name = "model.layers.3.self_attn.o_proj.weight"
    assert tensors[name].shape[0] == tensors[name].shape[1]
    tensors[name] = tensors[name].T


def regroup_queries(tensors: dict[str, torch.Tensor]) -> None:
    """Queries of layer 0 dealt to the key/value groups in turn instead of in runs."""
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = tensors[name]
    tensors[name] = whole.view(6, 2, 8, -1).transpose(0, 1).reshape(whole.shape)


def swap_norms(tensors: dict[str, torch.Tensor]) -> None:
    """Query and key norms of layer 0."""
    a, b = (f"model.layers.0.self_attn.{which}_norm.weight" for which in ("q", "k"))
    tensors[a], tensors[b] = tensors[b].roll(1), tensors[a].roll(1)


@pytest.mark.parametrize("plant", [swap_experts, swap_gate_and_up, transpose_output, regroup_queries, swap_norms])
def test_a_planted_error_is_seen(
    plant: Callable[[dict[str, torch.Tensor]], None], pool: WorkerPool, models: Any, tmp_path: Path
) -> None:
    hf_dir, expected = models("moe5")
    planted = changed_copy(hf_dir, tmp_path / "planted", plant)
    (logits,) = pool.run(CONVERT, layout=SINGLE, hf_dir=str(planted))
    assert relative(logits, expected) > 100 * TOLERANCE


def test_a_directory_that_transformers_wrote(pool: WorkerPool, tmp_path: Path) -> None:
    """Several files with an index, and the config spelling of transformers 5."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 2000.0},
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    expected = transformers_logits(tmp_path / "theirs")
    assert expected.std() > 1
    arguments = {"hf_dir": str(tmp_path / "theirs"), "out_dir": str(tmp_path / "ours")}
    for logits in pool.run(CONVERT, layout=EP2_PP2, **arguments)[2:]:
        assert relative(logits, expected) < TOLERANCE
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
