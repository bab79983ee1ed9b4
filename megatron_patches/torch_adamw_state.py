"""Fault: DistributedOptimizer mishandles the step counter of PyTorch's own AdamW.

Seen in Megatron-Core 0.16.1 and 0.19.2, `optimizer.distrib_optimizer`, where neither Transformer Engine nor apex is
installed. PyTorch keeps a `step` tensor in each parameter's state; the fused optimizers keep one number a group.
Effect: `state_dict` of a fresh optimizer fails an assertion; loading raises KeyError `step`; and after a resume all
parameters share one tensor, so that each update counts once per parameter and the bias correction jumps.
Mending: a fresh state is made before it is saved, the step is copied with the other tensors, and each parameter gets a
tensor of its own after loading.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch
from moe_asyncrl.config.capability import adam_source


def _mend(module: ModuleType) -> None:
    import torch

    optimizer_class = module.DistributedOptimizer
    copy_states = optimizer_class._set_main_param_and_optimizer_states
    load, save = optimizer_class.load_state_dict, optimizer_class.state_dict

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        copy_states(self, model_param, tensors)

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **zeros)
        return save(self)

    optimizer_class._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class.state_dict = state_dict


PATCH = Patch(
    name="torch_adamw_state",
    seen_in="megatron-core 0.16.1, 0.19.2",
    modules=("megatron.core.optimizer.distrib_optimizer",),
    applies=lambda capabilities: adam_source(capabilities) == "torch",
    after=_mend,
)
