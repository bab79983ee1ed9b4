"""The plan's keys, shapes and places are those that Megatron-Core's own models ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_asyncrl.checkpoint.convert.keys import default_layer_keys, keyed_parameters
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from tests.checkpoint.convert.jobs import Box
from tests.checkpoint.convert.support import global_shapes, layouts, objects
from tests.checkpoint.families import FAMILY_MODELS
from tests.checkpoint.models import MODELS, make
from tests.pool.pool import WorkerPool

SMALL = ("moe5", "moe4tied", "tied")
# Every family on the layout that cuts most, and each kind of cut somewhere by itself.
CASES = [
    *((name, layouts(name)[-1]) for name in FAMILY_MODELS),
    ("deepseek", layouts("deepseek")[1]),
    ("moe5", Layout(dp=2, ep=2)),
    ("moe4tied", Layout(pp=4)),
    ("tied", Layout(tp=2, pp=2)),
    ("tied", Layout(pp=2, vpp=2)),
]


def elements_of(boxes: list[Box]) -> dict[str, int]:
    """Elements of each key, from different boxes."""
    found: dict[str, int] = {}
    for key, _, _, sizes in set(boxes):
        elements = 1
        for size in sizes:
            elements *= size
        found[key] = found.get(key, 0) + elements
    return found


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_the_plan_is_what_real_models_ask_for(name: str, layout: Layout, pool: WorkerPool, tmp_path: Path) -> None:
    assert name in MODELS
    hf_dir = make(tmp_path, name)
    spec = ModelSpec.from_hf(hf_dir)
    ranks = pool.run("tests.checkpoint.convert.jobs:boxes", layout=layout, hf_dir=str(hf_dir))
    compare(spec, ranks)


def compare(spec: ModelSpec, ranks: list[dict[str, Any]]) -> None:
    layers = default_layer_keys(spec)
    planned = global_shapes(spec, layers)
    boxes: list[Box] = [box for rank in ranks for box in rank["tensors"]]
    padded = set().union(*(rank["padded"] for rank in ranks))
    asked = {key: shape for key, shape, _, _ in boxes}
    for key, shape in asked.items():
        if key in padded:
            assert shape[0] >= planned[key][0] and shape[1:] == planned[key][1:], key
        else:
            assert shape == planned[key], key
    # Each parameter is asked for under one of its keys, whole.
    for keyed in keyed_parameters(spec, layers):
        assert len([key for key in keyed.keys if key in asked]) == 1, keyed.keys
    for key, elements in elements_of(boxes).items():
        whole = 1
        for size in asked[key]:
            whole *= size
        assert elements == whole, f"{key}: the ranks' boxes cover {elements} of {whole}"
    wanted = set().union(*(rank["objects"] for rank in ranks))
    assert wanted and wanted <= objects(spec, layers)
    # A part of a stack is asked for where the plan has it.
    places = {(key, tuple(lead.index for lead in k.lead)) for k in keyed_parameters(spec, layers) for key in k.keys}
    leads = {key: len(k.lead) for k in keyed_parameters(spec, layers) for key in k.keys}
    assert {(key, offsets[: leads[key]]) for key, _, offsets, _ in boxes} <= places


def test_a_plan_of_another_model_is_seen(pool: WorkerPool, tmp_path: Path) -> None:
    hf_dir = make(tmp_path, "moe5")
    spec = ModelSpec.from_hf(hf_dir)
    ranks = pool.run("tests.checkpoint.convert.jobs:boxes", layout=Layout(), hf_dir=str(hf_dir))
    compare(spec, ranks)
    for wrong in (
        replace(spec, num_experts=spec.num_experts + 1),
        replace(spec, moe_layers=(True,) * 5),
        replace(spec, hidden_size=spec.hidden_size // 2),
        replace(spec, tie_embeddings=True),
    ):
        with pytest.raises((AssertionError, KeyError)):
            compare(wrong, ranks)
