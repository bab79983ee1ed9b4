"""The table of fused tensors against the source of SGLang's loaders, read as text."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.weights.fuse import FUSED, LATENT, QKV, W13, fused_group
from tests.models.strategies import DENSE, MOE
from tests.train.parity_jobs import tiny_spec

FILES = {
    "qwen3": "qwen3.py",
    "llama": "llama.py",
    "qwen3_moe": "qwen3_moe.py",
    "mixtral": "mixtral.py",
    "glm4_moe": "glm4_moe.py",
    "deepseek_v3": "deepseek_common/deepseek_weight_loader.py",
    "gpt_oss": "gpt_oss.py",
    "minimax_m2": "minimax_m2.py",
}
ROW = re.compile(r'\("\.?(\w+)", "\.?(\w+)", (?:"[qkv]"|[01])\)')
EXPERTS = re.compile(r'ckpt_gate_proj_name="(\w+)",\s*ckpt_down_proj_name="(\w+)",\s*ckpt_up_proj_name="(\w+)"')


def source(family: str) -> str:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "srt" / "models" / FILES[family]).read_text()


@pytest.mark.parametrize("family", (*DENSE, *MOE))
def test_the_table_is_what_sglangs_loaders_fuse(family: str) -> None:
    text = source(family)
    theirs: dict[str, set[str]] = {}
    for whole, part in ROW.findall(text):
        theirs.setdefault(whole, set()).add(part)
    for gate, _, up in EXPERTS.findall(text):
        theirs[{"gate_proj": "gate_up_proj", "w1": "w13"}[gate]] = {gate, up}
    if "cached_a_proj" in text:
        assert all(f'"{part}" in name' in text for part in LATENT.parts)
        theirs[LATENT.whole] = set(LATENT.parts)
    ours = {fused.whole: set(fused.parts) for fused in FUSED[family]}
    if family == "minimax_m2":
        # Copied from other files: none of its layers has such tensors.
        theirs.pop("gate_up_proj")
    assert theirs == ours


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", ["self_attn.q_proj.weight", "self_attn.k_proj.bias", "self_attn.v_proj.weight_scale_inv"]),
        ("qwen3_moe", ["mlp.experts.7.gate_proj.weight", "mlp.experts.7.up_proj.weight"]),
        ("mixtral", ["block_sparse_moe.experts.7.w1.weight", "block_sparse_moe.experts.7.w3.weight_scale"]),
        ("deepseek_v3", ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight_scale_inv"]),
        ("gpt_oss", ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_scales"]),
        ("gpt_oss", ["self_attn.o_proj.weight", "self_attn.o_proj.bias"]),
    ],
)
def test_what_travels_together(family: str, names: list[str]) -> None:
    assert len({fused_group(family, f"model.layers.3.{name}") for name in names}) == 1


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "qwen3_moe",
            ["mlp.experts.7.gate_proj.weight", "mlp.experts.8.up_proj.weight", "mlp.experts.7.down_proj.weight"],
        ),
        ("qwen3_moe", ["self_attn.q_proj.weight", "self_attn.q_norm.weight", "self_attn.o_proj.weight"]),
        ("deepseek_v3", ["self_attn.q_a_proj.weight", "self_attn.q_a_layernorm.weight", "self_attn.kv_b_proj.weight"]),
        ("gpt_oss", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.sinks", "mlp.router.weight"]),
    ],
)
def test_what_does_not_have_to(family: str, names: list[str]) -> None:
    assert len({fused_group(family, f"model.layers.3.{name}") for name in names}) == len(names)


def test_megatrons_own_fused_parameters_are_never_parted() -> None:
    spec = tiny_spec()
    for entry in parameter_map(spec).entries:
        assert len({fused_group(spec.family, tensor.name) for tensor in entry.hf}) == 1
    assert QKV.parts == ("q_proj", "k_proj", "v_proj") and W13.parts == ("w1", "w3")


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UserError, match="nothing is known of how engines fuse the tensors of other"):
        fused_group("other", "x")
