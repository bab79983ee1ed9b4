"""Reading a Hugging Face `config.json`, as written by transformers 4 or 5, into a `ModelSpec`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.families import FAMILIES
from moe_asyncrl.models.features import MtpForm
from moe_asyncrl.models.hf_fields import HfFields
from moe_asyncrl.models.quantization import Quantization, read_quantization
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.models.stored_names import mtp_form, remembered_mtp_form, stored_names


def read_spec(directory: Path) -> ModelSpec:
    """The spec of an HF directory. Raises UserError as `ModelSpec.from_hf` says."""
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    path = directory / "config.json"
    spec = spec_from_config(_read_object(path), source=str(path))
    generation = directory / "generation_config.json"
    if generation.is_file():
        fields = HfFields(_read_object(generation), str(generation))
        ids = fields.token_ids("eos_token_id", spec.vocab_size) or spec.eos_token_ids
        pad = fields.token_ids("pad_token_id", spec.vocab_size)
        spec = replace(spec, eos_token_ids=ids, pad_token_id=pad[0] if pad else spec.pad_token_id)
    if spec.mtp_layers:
        spec = replace(spec, mtp_form=_mtp_form(directory, spec))
    return spec


def _mtp_form(directory: Path, spec: ModelSpec) -> MtpForm:
    names = stored_names(directory)
    try:
        remembered = None if names else remembered_mtp_form(directory)
    except (ValueError, TypeError) as error:
        raise UserError(f"{directory}: the form of multi-token-prediction layers cannot be read: {error}") from error
    return remembered or mtp_form(names, spec.num_layers, spec.mtp_layers)


def spec_from_config(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The spec of a parsed `config.json`; `source` names the file in errors."""
    family = FAMILIES[architecture_of(config, source)]
    fields = HfFields(config, source)
    fields.refuse_unsupported(windows=family.windows)
    return family.read_spec(fields)


def quantization_of(directory: Path) -> Quantization | None:
    """How the `config.json` of a directory says that its weights are quantised; None if it does not, or is not there.

    Raises UserError for a form that is not read here.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None
    return read_quantization(_read_object(path), HfFields({}, str(path)).fail)


def architecture_of(config: Mapping[str, Any], source: str) -> str:
    """The one supported class named in `architectures`."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{source}: `architectures` must name exactly one class, found {names!r}")
    name: str = names[0]
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(f"{source}: unknown architecture {name!r}{hint} Supported: {', '.join(sorted(FAMILIES))}")
    return name


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: is {path.parent} a Hugging Face model directory?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
