"""Conversions as the tests call them."""

from __future__ import annotations

from pathlib import Path

from moe_asyncrl.checkpoint.convert.keys import LayerKeys, keyed_parameters, object_keys
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from tests.checkpoint.families import FAMILY_MODELS


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its name there."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def global_shapes(spec: ModelSpec, layers: LayerKeys) -> dict[str, tuple[int, ...]]:
    """The plan's keys, each under both names where there are two."""
    return {key: keyed.global_shape for keyed in keyed_parameters(spec, layers) for key in keyed.keys}


def objects(spec: ModelSpec, layers: LayerKeys) -> set[str]:
    """The plan's objects."""
    return set(object_keys(keyed_parameters(spec, layers)))


def layouts(name: str) -> list[Layout]:
    """One process, EP2, PP2, TP2, EP2×PP2 as the family can be laid out; stages of 5 or 7 layers are uneven."""
    layers = FAMILY_MODELS[name][1]["num_hidden_layers"]
    split = (3, 4) if layers == 7 else (2, 3)
    found = [Layout(), Layout(tp=2), Layout(pp=2, stage_layers=split)]
    if name == "llama":
        return [*found, Layout(tp=2, pp=2, stage_layers=split)]
    return [*found, Layout(dp=2, ep=2), Layout(dp=2, ep=2, pp=2, stage_layers=split)]
