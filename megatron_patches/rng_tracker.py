"""Fault: the random-number tracker keeps and restores CUDA generator states only.

Seen in Megatron-Core 0.16.1, `tensor_parallel.random`.
Effect: adding a state or forking the generator raises without CUDA; recomputation cannot restore dropout.
Mending: the tracker's two accessors and `fork` use the CPU's generator. Upstream's `fork` would log a warning each
time the CPU's state changes inside it, which here is the purpose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch, on_cpu


def _mend(module: ModuleType) -> None:
    import torch

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"the random-number state {name} was never added")
        outer_state, outer_name = torch.get_rng_state(), self._current_state_name
        if outer_name != "default-rng":
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state if outer_name == "default-rng" else self.states_[outer_name])
            self._current_state_name = outer_name

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]
    module.CudaRNGStatesTracker.fork = fork


PATCH = Patch(
    name="rng_tracker",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.tensor_parallel.random",),
    applies=on_cpu,
    after=_mend,
)
