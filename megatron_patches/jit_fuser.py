"""Fault: small functions are compiled with `torch.compile` wherever PyTorch is new enough.

Seen in Megatron-Core 0.16.1, `jit`.
Effect: on a CPU each of them starts a C++ compiler on its first call: seconds, or an error where there is none.
Mending: the decorator becomes the identity, which is what Megatron-Core's own `disable_jit_fuser` does, but in time
for the modules that decorate while they are imported.
"""

from __future__ import annotations

from types import ModuleType

from megatron_patches.patch import Patch, on_cpu


def _mend(module: ModuleType) -> None:
    module.disable_jit_fuser()


PATCH = Patch(
    name="jit_fuser",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.jit",),
    applies=on_cpu,
    after=_mend,
)
