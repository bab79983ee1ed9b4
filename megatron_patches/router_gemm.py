"""Fault: the router's matrix product reads a name that exists only with Transformer Engine.

Seen in Megatron-Core 0.16.1, `transformer.moe.moe_utils`: `te_general_gemm` is imported in a block that fails as a
whole without Transformer Engine, and is then compared with None.
Effect: NameError in the first router.
Mending: the name is set to None where it is missing.
"""

from __future__ import annotations

from types import ModuleType

from megatron_patches.patch import Patch


def _mend(module: ModuleType) -> None:
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


PATCH = Patch(
    name="router_gemm",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.transformer.moe.moe_utils",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
