"""The supported families, by the HF class that `config.json` names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.families import deepseek_v3, glm4_moe, gpt_oss, llama, minimax_m2, mixtral, qwen3, qwen3_moe
from moe_asyncrl.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        module.FAMILY.architecture: module.FAMILY
        for module in (qwen3, qwen3_moe, llama, mixtral, glm4_moe, deepseek_v3, gpt_oss, minimax_m2)
    }
)


def family_named(name: str) -> Family:
    """The family with our short name, for example `qwen3_moe`. Raises UserError if there is none."""
    for family in FAMILIES.values():
        if family.name == name:
            return family
    raise UserError(f"unknown model family {name!r}; supported: {', '.join(sorted(f.name for f in FAMILIES.values()))}")
