"""AdamW by Megatron-Core's distributed optimizer, with the learning rate set from outside at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moe_asyncrl.config.capability import AdamSource
from moe_asyncrl.config.recipe import Optimizer as OptimizerSettings


def make_optimizer(ddp_chunks: Sequence[Any], settings: OptimizerSettings, *, dtype: torch.dtype) -> Any:
    """Megatron-Core's optimizer for chunks wrapped with `wrap_ddp(..., distributed_optimizer=True)`.

    Weights, moments and gradients are kept in float32, spread over data-parallel ranks; norms and biases do not decay.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=True,
        lr=settings.lr,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, list(ddp_chunks))


def adam_in_use() -> AdamSource:
    """Where the Adam that Megatron-Core found comes from; `config.capability.adam_source` says where it should."""
    from megatron.core.optimizer import Adam

    package = str(Adam.__module__).split(".", 1)[0]
    if package == "transformer_engine":
        return "transformer_engine"
    return "apex" if package == "apex" else "torch"


def set_rates(optimizer: Any, *, lr: float, weight_decay: float) -> None:
    """Set learning rate and weight decay for the next update, in all groups by their own multipliers."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def forget_moments(optimizer: Any) -> None:
    """Start Adam anew on the same weights: another objective begins, whose gradients have another scale."""
    for inner in _torch_optimizers(optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = 0


def _torch_optimizers(optimizer: Any) -> Iterator[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "optimizer", None) is not None:
            yield part.optimizer
