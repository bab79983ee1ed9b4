"""Looks at a model directory as a run will use it, without reading weights."""

from __future__ import annotations

from pathlib import Path

from moe_asyncrl.checkpoint.hf_load import check_tensors
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec


def check_model(recipe: Recipe) -> ModelSpec:
    """The model's spec, if its files are whole and the recipe can use it.

    Raises:
        UserError: a missing, damaged or incomplete checkpoint, a layout that does not fit, a context longer than the
            model's.
    """
    path = Path(recipe.model.path)
    spec = ModelSpec.from_hf(path)
    with SafetensorsDir(path) as stored:
        check_tensors(stored, spec)
    if recipe.model.max_context > spec.max_position_embeddings:
        raise UserError(
            f"model.max_context {recipe.model.max_context} is longer than the {spec.max_position_embeddings} tokens "
            f"that {path} was made for"
        )
    t = recipe.trainer
    layout = Layout(tp=t.tp, pp=t.pp, vpp=t.vpp, ep=t.ep, etp=t.tp if t.etp is None else t.etp, cp=t.cp, dp=t.dp)
    layout.layers_of(0, 0, spec.num_layers)
    if spec.is_moe:
        layout.experts_of(0, spec.num_experts)
    elif t.ep > 1 or recipe.engine.ep > 1:
        raise UserError(f"trainer.ep {t.ep}, engine.ep {recipe.engine.ep}: {path} has no experts; set both to 1")
    return spec
