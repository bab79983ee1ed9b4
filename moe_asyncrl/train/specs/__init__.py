"""From a ModelSpec to Megatron-Core's configuration and layers: one file a family, and the factory that picks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.specs import deepseek_v3, glm4_moe, gpt_oss, llama, minimax_m2, mixtral, qwen3, qwen3_moe

ConfigFields = dict[str, Any]

FAMILIES: dict[str, Callable[[ModelSpec], ConfigFields]] = {
    "qwen3": qwen3.config_fields,
    "qwen3_moe": qwen3_moe.config_fields,
    "llama": llama.config_fields,
    "mixtral": mixtral.config_fields,
    "glm4_moe": glm4_moe.config_fields,
    "deepseek_v3": deepseek_v3.config_fields,
    "gpt_oss": gpt_oss.config_fields,
    "minimax_m2": minimax_m2.config_fields,
}


def config_fields(spec: ModelSpec) -> ConfigFields:
    """What the model itself says about `TransformerConfig`: sizes, norms, router. Nothing about layout or machine.

    Raises:
        UserError: the family is unknown, or a value of it cannot be expressed.
    """
    try:
        family = FAMILIES[spec.family]
    except KeyError:
        raise UserError(f"family {spec.family}: the trainer knows only {', '.join(sorted(FAMILIES))}") from None
    return family(spec)
