"""Runtime patches for Megatron-Core: one upstream fault a file, applied as its modules are imported.

Call `apply(capabilities)` once, before anything imports `megatron.core`. Site-packages stay as they are. Where a fault
cannot show (mostly: where there is a CUDA device) its patch does nothing; with no patch left, there is no hook at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from megatron_patches import (
    checkpoint_writer,
    cuda_calls,
    expert_bias_gradient,
    expert_bias_share,
    expert_output_bias,
    jit_fuser,
    mla_down_projections,
    mla_layer_check,
    moe_split_sizes,
    norm_sequence_parallel,
    optimizer_tensor_types,
    packed_rope,
    rng_tracker,
    router_gemm,
    router_padding,
    torch_adamw_state,
    uneven_collectives,
    unusable_packages,
)
from megatron_patches.hook import PatchFinder, installed_finder
from megatron_patches.patch import Patch
from moe_asyncrl.config.capability import Capabilities

__all__ = ["PATCHES", "Patch", "active_patches", "apply"]

PATCHES: tuple[Patch, ...] = (
    unusable_packages.TRANSFORMER_ENGINE,
    unusable_packages.APEX,
    cuda_calls.PATCH,
    rng_tracker.PATCH,
    jit_fuser.PATCH,
    optimizer_tensor_types.PATCH,
    uneven_collectives.PATCH,
    router_gemm.PATCH,
    router_padding.PATCH,
    moe_split_sizes.PATCH,
    norm_sequence_parallel.PATCH,
    torch_adamw_state.PATCH,
    checkpoint_writer.PATCH,
    mla_layer_check.PATCH,
    mla_down_projections.PATCH,
    packed_rope.PATCH,
    expert_output_bias.PATCH,
    expert_bias_gradient.PATCH,
    expert_bias_share.PATCH,
)


def active_patches(capabilities: Capabilities, *, leave_out: Iterable[str] = ()) -> tuple[Patch, ...]:
    """The patches that a machine needs. `leave_out` names patches to skip, to show what they mend.

    Raises:
        ValueError: `leave_out` names no patch of ours.
    """
    skipped = frozenset(leave_out)
    unknown = skipped - {patch.name for patch in PATCHES}
    if unknown:
        raise ValueError(f"no patch is named {', '.join(sorted(unknown))}")
    return tuple(patch for patch in PATCHES if patch.applies(capabilities) and patch.name not in skipped)


def apply(capabilities: Capabilities, *, leave_out: Iterable[str] = ()) -> tuple[Patch, ...]:
    """Install the hook for the patches that this machine needs, and return them. A second call changes nothing.

    Raises:
        RuntimeError: Megatron-Core is already imported without them, or another set of patches is installed.
    """
    patches = active_patches(capabilities, leave_out=leave_out)
    finder = installed_finder()
    if finder is not None:
        if finder.patches != patches:
            raise RuntimeError("megatron_patches.apply was called before with other capabilities; call it once")
        return patches
    if not patches:
        return patches
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core is already imported, unpatched; call megatron_patches.apply(capabilities) before it"
        )
    sys.meta_path.insert(0, PatchFinder(patches))
    return patches
