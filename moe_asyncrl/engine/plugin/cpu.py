"""Which parts of SGLang a CPU engine replaces, and with what. Each entry says what goes wrong without it."""

from __future__ import annotations

import functools
from typing import Any

HOOKS: tuple[tuple[str, str, str], ...] = (
    # (target in SGLang, kind of hook, function here)
    # Recording routed experts pins its host buffer through the CUDA runtime, also with --device cpu: the server dies at
    # start.
    ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", "replace", "cpu:skip_host_register"),
    # Under expert parallelism, experts of other ranks have id -1, which the original uses as an index. Ours is also
    # faster.
    ("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", "around", "cpu_moe:moe_forward"),
    # The original attends one sequence after the other in Python: three quarters of a CPU engine's time.
    (
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.init_forward_metadata",
        "after",
        "cpu_backend:forget_plan",
    ),
    (
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
        "around",
        "cpu_backend:decode",
    ),
    (
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
        "around",
        "cpu_backend:extend",
    ),
    # gpt-oss hands the backend its sinks, which this one does not know, and so SGLang refuses the two together.
    (
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode",
        "around",
        "cpu_backend:take_sinks",
    ),
    (
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        "around",
        "cpu_backend:take_sinks",
    ),
    ("sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments", "around", "cpu_backend:claim_sinks"),
    # SGLang gives windowed layers a smaller pool whose slots have numbers of their own; this backend reads by those of
    # the other pool: right until slots are used again, then wrong or out of range.
    ("sglang.srt.configs.model_config.is_hybrid_swa_model", "replace", "cpu_backend:one_pool"),
    # The norm of MiniMax-M2's queries and keys is a Triton kernel or one for AMX.
    ("sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm.forward", "replace", "cpu_norm:norm_over_heads"),
    # Prompts of multi-latent attention otherwise take a form that this backend cannot compute: a shape error.
    (
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        "around",
        "cpu_latent:absorbed",
    ),
    # A paused scheduler polls on a full core, also with --sleep-on-idle, and takes it from the trainer that it waits
    # for.
    (
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        "after",
        "cpu:sleep_until_asked",
    ),
)

UNPINNED = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")


def skip_host_register(*args: Any, **kwargs: Any) -> None:
    """Nothing to register: host memory is the device's memory."""


def _without_pinning(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def unpin() -> None:
    """Make torch ignore `pin_memory` in this process: SGLang's LoRA layers ask for it, and nothing here can pin."""
    import torch

    for name in UNPINNED:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def sleep_until_asked(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Once a turn of a paused scheduler: wait as an idle one does, at most a second, for the next message to it."""
    scheduler.maybe_sleep_on_idle()


def skip_freeze(*args: Any, **kwargs: Any) -> None:
    """The server asks itself before it listens, and logs a traceback; our launcher asks when it does listen."""


def fork_children(*args: Any, **kwargs: Any) -> None:
    """Let the server's main process fork its scheduler and detokenizer.

    SGLang spawns them because CUDA does not survive a fork. Here nothing has run yet, and a fork saves each child the
    ten seconds in which it would import everything again. A thread would be missing in the children, perhaps with a
    lock that it holds; so with one, which was not seen, they are spawned.
    """
    import multiprocessing
    import os

    if len(os.listdir("/proc/self/task")) == 1:
        multiprocessing.set_start_method("fork", force=True)


def register_cpu() -> None:
    """Register every hook with SGLang, once per process (SGLang calls plugins once).

    Raises SystemExit if SGLang has changed: it would only log that a hook failed, and serve without it.
    """
    import multiprocessing

    from moe_asyncrl.engine.plugin.hooks import register_hooks

    hooks = list(HOOKS)
    if multiprocessing.parent_process() is None:
        # Only the server's main process has this module loaded.
        hooks += [
            ("sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup", "replace", "cpu:skip_freeze"),
            ("sglang.srt.entrypoints.engine._set_envs_and_config", "after", "cpu:fork_children"),
        ]
    register_hooks(hooks, "which a CPU engine must replace")
    unpin()
