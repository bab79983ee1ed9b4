"""The quantised configs of published models are read as their unquantised ones, and their widths fit the forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_asyncrl.checkpoint.formats import fp8, mxfp4
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.published import read_published

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
FORMS: dict[str, dict[str, Any]] = {
    "deepseek-v3": FP8,
    "kimi-k2": FP8,
    "minimax-m2": FP8
    | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    "gpt-oss-20b": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}


@pytest.mark.parametrize("name", list(FORMS))
def test_the_config_is_read_as_that_of_the_unquantised_form(name: str) -> None:
    path = Path("configs/models") / f"{name}.yaml"
    plain = read_published(path).spec
    assert read_published(path, quantization_config=FORMS[name]).spec == plain
    assert read_published(path, quantization_config=FORMS[name], torch_dtype=None).spec == plain
    assert plain.torch_dtype == "bfloat16"


def test_published_widths_have_blocks_that_do_not_divide_them() -> None:
    shapes = {
        t.name: t.shape
        for t in parameter_map(read_published(Path("configs/models/deepseek-v3.yaml")).spec).hf_tensors()
    }
    found = {
        name.split(".", 3)[-1]: fp8.grid(shape, (128, 128))
        for name, shape in shapes.items()
        if ".60." in name and len(shape) == 2
    }
    assert found["self_attn.kv_a_proj_with_mqa.weight"] == (5, 56)  # 576 rows
    assert found["mlp.experts.0.down_proj.weight"] == (56, 16)
    assert found["self_attn.q_b_proj.weight"] == (192, 12)


def test_published_stacks_have_whole_groups() -> None:
    spec = read_published(Path("configs/models/gpt-oss-20b.yaml")).spec
    shapes = {t.name: t.shape for t in parameter_map(spec).hf_tensors()}
    prefix = "model.layers.0.mlp.experts."
    assert mxfp4.logical_shape((32, 5760, 90, 16)) == shapes[prefix + "gate_up_proj"]
    assert mxfp4.logical_shape((32, 2880, 90, 16)) == shapes[prefix + "down_proj"]
