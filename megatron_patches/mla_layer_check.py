"""Fault: multi-latent attention believes in Transformer Engine's layers where they are absent.

Seen in Megatron-Core 0.16.1, `transformer.multi_latent_attention`: the names can be imported, since stand-ins are made
for them, and `HAVE_TE` becomes true.
Effect: the constructor compares a layer with a stand-in that is no class, which raises TypeError.
Mending: `HAVE_TE` is set to what is true.
"""

from __future__ import annotations

from types import ModuleType

from megatron_patches.patch import Patch


def _mend(module: ModuleType) -> None:
    module.HAVE_TE = False  # type: ignore[attr-defined]


PATCH = Patch(
    name="mla_layer_check",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.transformer.multi_latent_attention",),
    applies=lambda capabilities: not capabilities.transformer_engine,
    after=_mend,
)
