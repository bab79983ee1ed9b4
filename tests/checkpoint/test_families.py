"""Every family computes in Megatron-Core what it does in transformers, on each layout, and comes out as it went in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moe_asyncrl.models.layout import Layout
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.models import changed_copy, make, relative
from tests.checkpoint.parity import CONVERT, TOLERANCE, check_conversion
from tests.pool.pool import WorkerPool

SINGLE = Layout()


def layouts(name: str) -> list[Layout]:
    """One process, EP2, PP2, TP2 and EP2×PP2; the stages of 5 or 7 layers are uneven."""
    split = (3, 4) if FAMILY_MODELS[name][1]["num_hidden_layers"] == 7 else (2, 3)
    # Experts with biases cannot be split, so gpt-oss has its experts on two ranks there.
    tp2 = Layout(tp=2, ep=2) if name == "gpt-oss" else Layout(tp=2)
    dense = [SINGLE, tp2, Layout(pp=2, stage_layers=split)]
    if name == "llama":
        return [*dense, Layout(tp=2, pp=2, stage_layers=split)]
    return [*dense, Layout(dp=2, ep=2), Layout(dp=2, ep=2, pp=2, stage_layers=split)]


CASES = [(name, layout) for name in FAMILY_MODELS for layout in layouts(name)]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_logits_equal_transformers_and_the_export_is_the_checkpoint(
    name: str, layout: Layout, pool: WorkerPool, models: Any, tmp_path: Path
) -> None:
    check_conversion(pool, layout, *models(name), tmp_path / "out")


@pytest.mark.parametrize("name", list(FAMILY_MODELS))
def test_a_bfloat16_checkpoint_comes_out_as_it_went_in(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Through two processes of each kind of parallelism that the family has; expert biases stay float32."""
    hf_dir = make(tmp_path, name, "bfloat16")
    layout = layouts(name)[-1]
    pool.run(CONVERT, layout=layout, hf_dir=str(hf_dir), out_dir=str(tmp_path / "out"))
    with safe_open(hf_dir / "model.safetensors", framework="pt") as stored:
        types = {key: stored.get_slice(key).get_dtype() for key in stored.keys()}  # noqa: SIM118
    assert {kind for key, kind in types.items() if "e_score_correction_bias" in key} <= {"F32"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (hf_dir / "model.safetensors").read_bytes()


Tensors = dict[str, torch.Tensor]


def swap(a: str, b: str) -> Callable[[Tensors], None]:
    """Two tensors change places."""

    def plant(tensors: Tensors) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return plant


def roll(name: str, by: int = 1, axis: int = 0) -> Callable[[Tensors], None]:
    """The entries of one tensor move on along an axis."""

    def plant(tensors: Tensors) -> None:
        tensors[name] = tensors[name].roll(by, axis)

    return plant


PLANTED = {
    "mixtral, gate and up": (
        "mixtral",
        swap(*(f"model.layers.1.block_sparse_moe.experts.0.{w}.weight" for w in ("w1", "w3"))),
    ),
    "glm, expert bias": ("glm", roll("model.layers.3.mlp.gate.e_score_correction_bias")),
    "glm, query bias": ("glm", roll("model.layers.0.self_attn.q_proj.bias", 8)),
    "glm, shared expert": (
        "glm",
        swap(*(f"model.layers.2.mlp.shared_experts.{w}_proj.weight" for w in ("gate", "up"))),
    ),
    "deepseek, expert bias": ("deepseek", roll("model.layers.2.mlp.gate.e_score_correction_bias", 2)),
    "deepseek, heads of keys and values": ("deepseek", roll("model.layers.0.self_attn.kv_b_proj.weight", 22)),
    "deepseek, rotary part of the key": ("deepseek", roll("model.layers.0.self_attn.kv_a_proj_with_mqa.weight")),
    "kimi, latent norm": ("kimi", roll("model.layers.1.self_attn.kv_a_layernorm.weight")),
    "gpt-oss, experts": ("gpt-oss", roll("model.layers.1.mlp.experts.gate_up_proj")),
    "gpt-oss, gate and up": ("gpt-oss", roll("model.layers.1.mlp.experts.gate_up_proj", 1, 2)),
    "gpt-oss, sinks": ("gpt-oss", roll("model.layers.0.self_attn.sinks")),
    "gpt-oss, expert output bias": ("gpt-oss", roll("model.layers.1.mlp.experts.down_proj_bias")),
    "minimax, norm of keys": ("minimax", roll("model.layers.0.self_attn.k_norm.weight", 8)),
    "minimax, expert bias": ("minimax", roll("model.layers.1.block_sparse_moe.e_score_correction_bias")),
}


@pytest.mark.parametrize("error", list(PLANTED))
def test_a_planted_error_is_seen(error: str, pool: WorkerPool, models: Any, tmp_path: Path) -> None:
    name, plant = PLANTED[error]
    hf_dir, expected = models(name)
    planted = changed_copy(hf_dir, tmp_path / "planted", plant)
    (logits,) = pool.run(CONVERT, layout=SINGLE, hf_dir=str(planted))
    assert relative(logits, expected) > 100 * TOLERANCE
