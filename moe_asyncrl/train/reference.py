"""The reference model: frozen weights that the policy's own Megatron model evaluates.

Each rank keeps its own shards of them in host memory. For a pass they change places with the policy's, one parameter at
a time, and back again: the device holds one model plus one parameter, the host one model, and bits are only moved.

    policy on the device, reference on the host  ──in_place──▶  reference on the device, policy on the host  ──▶  back
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.checkpoint.preflight import check_reference
from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.messages import Counters, Cursor
from moe_asyncrl.telemetry.run_folder import RunFolder
from moe_asyncrl.train import checkpoint
from moe_asyncrl.train.checkpoint_folder import CheckpointInfo, newest_complete
from moe_asyncrl.train.identity import model_digest
from moe_asyncrl.train.passes import ModelOnRank
from moe_asyncrl.weights.agree import agree


class Reference:
    """The frozen weights of this rank. As made, they are those that the model has now."""

    def __init__(self, model: ModelOnRank) -> None:
        pinned = model.device.type == "cuda"
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunk in model.chunks:
            biases = (buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias"))
            for parameter in (*chunk.parameters(), *biases):
                host = torch.empty_like(parameter, device="cpu", pin_memory=pinned, requires_grad=False)
                self._pairs.append((parameter, host.copy_(parameter.data)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model computes with the frozen weights; behind it, again with the policy's very bits.

        The policy must not be trained, saved or published inside.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, host in self._pairs:
            kept = parameter.data.clone()
            parameter.data.copy_(host)
            host.copy_(kept)


def wanted(recipe: Recipe) -> bool:
    """Whether the run has a reference at all: it costs a copy of the weights and a forward pass for each batch."""
    return recipe.algorithm.objective == "grpo" and (recipe.algorithm.kl_coef > 0 or recipe.model.reference is not None)


def open_reference(recipe: Recipe, folder: RunFolder, model: ModelOnRank, *, fresh: bool) -> Reference | None:
    """The run's reference; None if the recipe wants none. Collective.

    Without `model.reference` it is the model as it stands when reinforcement learning starts (`fresh`); it is written
    to the run folder, where a resumed run finds it again.

    Raises:
        UserError: `model.reference` is another kind of model or damaged; the run folder has no reference or a damaged
            one.
    """
    if not wanted(recipe):
        return None
    path = recipe.model.reference
    if path is not None:
        with agree("looking at model.reference"):
            check_reference(Path(path), Path(recipe.model.path), model.spec)
        return from_hf(model, path)
    if fresh:
        info = CheckpointInfo(
            step=0,
            version=0,
            adam_steps=0,
            cursor=Cursor(),
            counters=Counters(),
            seed=recipe.run.seed,
            recipe_digest="",
            layout=str(model.layout),
            model=model_digest(model.spec),
        )
        checkpoint.save_weights(model, folder.reference, info)
        return Reference(model)
    with agree("looking for the run's reference"):
        found = newest_complete(folder.reference)
        if found is None:
            raise UserError(
                f"{folder.reference}: the weights that this run started from were not kept, as it had no KL to a "
                "reference then; set model.reference (without warm-up, to model.path), or algorithm.kl_coef to 0"
            )
        if found[1].model != model_digest(model.spec):
            raise UserError(f"{found[0]}: the reference is a model of another shape than model.path")
    reference = Reference(model)
    with reference.in_place():
        checkpoint.load_weights(model, found[0])
    return reference


def from_hf(model: ModelOnRank, directory: str | Path) -> Reference:
    """The weights of an HF directory of the same kind of model, in the types of this one. Collective.

    Raises:
        UserError: its tensors do not fit, or it is damaged. The policy is as it was.
    """
    reference = Reference(model)
    with reference.in_place():
        load_hf(model.chunks, model.spec, model.layout, directory, rank=model.rank)
    return reference
