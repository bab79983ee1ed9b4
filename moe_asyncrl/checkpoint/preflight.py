"""Looks at a model directory as a run will use it, without reading weights."""

from __future__ import annotations

from pathlib import Path

from moe_asyncrl.checkpoint.hf_load import check_tensors
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.config.recipe import Engine, Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.compare import differences, same_vocabulary
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.trainable import check_trainable


def check_model(recipe: Recipe) -> ModelSpec:
    """The model's spec, if its files are whole and the recipe can use it.

    Raises:
        UserError: a missing, damaged or incomplete checkpoint, a layout that does not fit, a context longer than the
            model's, weights in a form that servers cannot be updated in.
    """
    path = Path(recipe.model.path)
    spec = ModelSpec.from_hf(path).with_mtp(recipe.model.mtp)
    with SafetensorsDir(path) as stored:
        check_tensors(stored, spec)
        if recipe.algorithm.objective == "grpo":
            check_served_form(stored, recipe)
    if recipe.model.max_context > spec.max_position_embeddings:
        raise UserError(
            f"model.max_context {recipe.model.max_context} is longer than the {spec.max_position_embeddings} tokens "
            f"that {path} was made for"
        )
    check_trainable(spec, Layout.of(recipe.trainer))
    check_engine(spec, recipe.engine)
    if recipe.model.reference is not None:
        check_reference(Path(recipe.model.reference), path, spec)
    return spec


def check_reference(reference: Path, path: Path, spec: ModelSpec) -> None:
    """Look at `model.reference` for a policy of `spec` at `path`; reads no weights.

    Raises:
        UserError: its files are not whole, or it is another architecture or has another vocabulary.
    """
    other = differences(spec, ModelSpec.from_hf(reference).with_mtp(spec.mtp))
    if other:
        more = "" if len(other) <= 3 else f" and {len(other) - 3} more"
        raise UserError(
            f"model.reference {reference}: another kind of model than model.path: {', '.join(other[:3])}{more}; the KL "
            "needs a checkpoint of the same architecture and vocabulary"
        )
    if not same_vocabulary(path, reference):
        raise UserError(
            f"model.reference {reference}: its tokenizer has another vocabulary than the one of model.path, so the "
            "same ids are other tokens; take a checkpoint with the same tokenizer"
        )
    with SafetensorsDir(reference) as stored:
        check_tensors(stored, spec)


def check_served_form(stored: SafetensorsDir, recipe: Recipe) -> None:
    """Raise UserError if servers would hold the weights in a form in which the recipe cannot update them."""
    if stored.quantization is None:
        return
    method = stored.quantization.method
    if method != "fp8":
        raise UserError(
            f"model.path {stored.directory}: its weights are {method.upper()}. The trainer reads them, but a server "
            "that holds them so cannot take its updates; write a plain copy with `moe-asyncrl convert hf-to-megatron` "
            "and `megatron-to-hf`, and set model.path to it"
        )
    for field, value, right in (
        ("weights.transport", recipe.weights.transport, ("broadcast", "disk", "shared_memory")),
        ("weights.delta", recipe.weights.delta, ("off",)),
        ("engine.dtype", recipe.engine.dtype, ("bfloat16",)),
    ):
        if value not in right:
            raise UserError(
                f"{field} is {value}, but the weights of model.path {stored.directory} are FP8, and servers that hold "
                f"FP8 take whole updates, quantised by the trainer from bfloat16; set it to {' or '.join(right)}"
            )


def check_engine(spec: ModelSpec, engine: Engine) -> None:
    """Raise UserError, naming sizes or field, if SGLang (0.5.23) cannot split the model so, or serves another one."""
    if spec.family == "mixtral" and spec.tie_embeddings:
        raise UserError(
            "`tie_word_embeddings` is true, and SGLang's Mixtral has an output layer of its own whatever it says: "
            "store lm_head.weight and set it to false"
        )
    if spec.family == "gpt_oss" and engine.ep > 1:
        raise UserError(f"engine.ep is {engine.ep}: SGLang loads a plain gpt-oss on one expert rank only; set it to 1")
    if not spec.is_moe and engine.ep > 1:
        raise UserError(f"engine.ep is {engine.ep}, but {spec.family} has no experts; set it to 1")
    for what, size, field, parts in (
        ("attention heads", spec.num_attention_heads, "engine.tp", engine.tp),
        ("experts", spec.num_experts, "engine.ep", engine.ep),
    ):
        if size % parts:
            raise UserError(f"{field} is {parts}, but the model's {size} {what} are not a multiple of it")
