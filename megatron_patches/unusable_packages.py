"""Fault: a package that is installed but cannot be used breaks Megatron-Core's import.

Seen in Megatron-Core 0.16.1. `import transformer_engine` without a CUDA driver raises RuntimeError, where
Megatron-Core only expects ImportError; and the `apex` of the package index, a web toolkit, imports well, after which
Megatron-Core takes it for NVIDIA's and picks fused kernels that are not there.
Effect: importing `megatron.core` fails, or building a model does.
Mending: a package whose probe failed is hidden, so that importing it raises ModuleNotFoundError.
"""

from __future__ import annotations

from megatron_patches.patch import Patch


def _hide(module: str) -> None:
    raise ModuleNotFoundError(f"{module} is hidden: it is installed but cannot be used here", name=module)


TRANSFORMER_ENGINE = Patch(
    name="unusable_transformer_engine",
    seen_in="megatron-core 0.16.1",
    modules=("transformer_engine.*",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    before=_hide,
)

APEX = Patch(
    name="unusable_apex",
    seen_in="megatron-core 0.16.1",
    modules=("apex.*",),
    applies=lambda capabilities: not capabilities.apex,
    before=_hide,
)
