"""Every family computes in Megatron-Core what it does in transformers, on each layout, and comes out as it went in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.models.layout import Layout
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.formats.quantised import fp8_copy, mxfp4_copy, same_bits
from tests.checkpoint.models import changed_copy, make, relative
from tests.checkpoint.parity import CONVERT, TOLERANCE, check_conversion
from tests.pool.pool import WorkerPool

SINGLE = Layout()


def layouts(name: str) -> list[Layout]:
    """One process, EP2, PP2, TP2 and EP2×PP2; the stages of 5 or 7 layers are uneven."""
    split = (3, 4) if FAMILY_MODELS[name][1]["num_hidden_layers"] == 7 else (2, 3)
    dense = [SINGLE, Layout(tp=2), Layout(pp=2, stage_layers=split)]
    if name == "llama":
        return [*dense, Layout(tp=2, pp=2, stage_layers=split)]
    return [*dense, Layout(dp=2, ep=2), Layout(dp=2, ep=2, pp=2, stage_layers=split)]


CASES = [(name, layout) for name in FAMILY_MODELS for layout in layouts(name)]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_logits_equal_transformers_and_the_export_is_the_checkpoint(
    name: str, layout: Layout, pool: WorkerPool, models: Any, tmp_path: Path
) -> None:
    check_conversion(pool, layout, *models(name), tmp_path / "out")


FP8 = ("glm", "glm-air", "deepseek", "kimi", "minimax", "moe4")
"""Tried in FP8, whether or not they are published so."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """A model in bfloat16 and in a quantised form that its family can have, made when first asked for."""
    root = tmp_path_factory.mktemp("stored")
    made: dict[str, dict[str, Path]] = {}

    def get(name: str) -> dict[str, Path]:
        if name not in made:
            forms = made[name] = {"bfloat16": make(root / "bfloat16", name, "bfloat16")}
            if name in FP8:
                forms["fp8"], _ = fp8_copy(forms["bfloat16"], root / "fp8" / name)
            if name == "gpt-oss":
                forms["mxfp4"], _ = mxfp4_copy(forms["bfloat16"], root / "mxfp4" / name)
        return made[name]

    return get


def contents(directory: Path) -> dict[str, bytes]:
    """Every file."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


EP2_PP2 = Layout(dp=2, ep=2, pp=2)
QWEN_CASES = [
    *(("moe4", layout) for layout in (SINGLE, Layout(dp=2, ep=2), Layout(pp=2), Layout(tp=2), EP2_PP2)),
    *(("tied", layout) for layout in (SINGLE, Layout(pp=2), Layout(tp=2), Layout(tp=2, pp=2))),
]
"""The families of test_parity."""
ALL_CASES = [*CASES, *QWEN_CASES]


@pytest.mark.parametrize(("name", "layout"), ALL_CASES, ids=[f"{name}-{layout}" for name, layout in ALL_CASES])
def test_stored_bytes_come_out_as_they_went_in(
    name: str, layout: Layout, pool: WorkerPool, stored: Any, tmp_path: Path
) -> None:
    """In bfloat16, and in FP8 where it is asked for; the tests of logits do float32. Expert biases stay float32.

    What is quantised leaves as the bfloat16 that it means, unless FP8 is asked for.
    """
    forms = stored(name)
    # FP8 as plain weights comes from the same values on every layout.
    plain = {form: path for form, path in forms.items() if form != "fp8" or layout == SINGLE}
    trips = [(str(path), str(tmp_path / f"{form}-plain"), "plain") for form, path in plain.items()]
    if "fp8" in forms:
        trips.append((str(forms["fp8"]), str(tmp_path / "fp8-fp8"), "fp8"))
    pool.run("tests.checkpoint.formats.jobs:there_and_back", layout=layout, trips=trips)
    for form in forms.keys() - {"mxfp4"}:
        out = tmp_path / ("fp8-fp8" if form == "fp8" else "bfloat16-plain")
        assert contents(out) == contents(forms[form])
    for form in plain.keys() - {"bfloat16"}:
        with SafetensorsDir(forms[form]) as source, SafetensorsDir(tmp_path / f"{form}-plain") as out_files:
            assert source.tensors.keys() == out_files.tensors.keys()
            assert {t.form for t in out_files.tensors.values()} == {"plain"}
            assert all(same_bits(source.read(n), out_files.read(n)) for n in source.tensors)
    with safe_open(tmp_path / "bfloat16-plain" / "model.safetensors", framework="pt") as out_file:
        types = {key: out_file.get_slice(key).get_dtype() for key in out_file.keys()}  # noqa: SIM118
    assert {kind for key, kind in types.items() if "e_score_correction_bias" in key} <= {"F32"}


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
