"""Weights and optimizer to and from disk, by Megatron-Core's distributed checkpoints (`torch_dist`), for any layout.

The optimizer is saved in its fully reshardable form: one tensor of the model's own shape for each weight and moment.
What Megatron-Core would save beside it, its parameter groups, is left out: they differ between pipeline stages and
layouts, and all that they know is settings, which the recipe has, and Adam's step, which our side file has. Nothing in
a step is random (there is no dropout), so there is no generator to save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.train.build import TrainState
from moe_asyncrl.train.checkpoint_folder import (
    CheckpointInfo,
    expired,
    folder_of,
    make_room,
    read_info,
    remove,
    seal,
    void,
)
from moe_asyncrl.train.checkpoint_write import Note, Writing, plan_and_copy
from moe_asyncrl.train.optimizer_state import sharded_state
from moe_asyncrl.train.passes import ModelOnRank
from moe_asyncrl.weights.agree import agree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begun:
    """A checkpoint that is being written, and what its side file will say."""

    writing: Writing
    info: CheckpointInfo


def save(state: TrainState, checkpoints: Path, info: CheckpointInfo, *, keep: int, keep_every: int = 0) -> Path:
    """Write the checkpoint of `info.step`; every rank calls this. Returns its folder.

    Raises:
        UserError: a rank could not write; the folder is then not a complete checkpoint.
    """
    return finish(begin(state, checkpoints, info), keep=keep, keep_every=keep_every)


def save_weights(model: ModelOnRank, checkpoints: Path, info: CheckpointInfo) -> Path:
    """Write the weights alone, as the one checkpoint in `checkpoints`; otherwise as `save`."""
    return finish(_begin(lambda: (_weights(model.chunks), {}), checkpoints, info), keep=1)


def begin(state: TrainState, checkpoints: Path, info: CheckpointInfo, note: Note | None = None) -> Begun:
    """Copy what this rank has to write of `info.step` and begin to write it; every rank calls this.

    Afterwards training may go on: the checkpoint holds the state of this moment. It is none before `finish`.
    """
    return _begin(lambda: _state(state), checkpoints, info, note)


def finish(begun: Begun, *, keep: int, keep_every: int = 0, stall_s: float = 600.0) -> Path:
    """Wait until all ranks have written, make the folder a checkpoint and remove older ones; every rank calls this.

    Raises:
        UserError: a rank could not write, or wrote nothing for `stall_s` seconds.
    """
    folder = begun.writing.folder
    begun.writing.wait(stall_s)

    def last() -> None:
        seal(folder, begun.info)
        old = expired(folder.parent, keep, keep_every)
        for each in old:
            void(each)
        # Large files take their time to go, and nothing waits for that but the end of the process.
        threading.Thread(target=_remove, args=(old,), name="retention").start()

    begun.writing.complete(last)
    return folder


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        try:
            remove(folder)
        except OSError as error:  # the newer one is complete; this one is tried again after the next save
            log.warning("%s: an old checkpoint that cannot be removed: %s", folder, error)


def _begin(
    content: Callable[[], tuple[dict[str, Any], dict[int, Any]]],
    checkpoints: Path,
    info: CheckpointInfo,
    note: Note | None = None,
) -> Begun:
    """`content`: weights and the optimizer's state, sharded."""
    what = f"the checkpoint of step {info.step}"
    with agree(f"making room for {what}"):
        folder = make_room(checkpoints, info.step) if dist.get_rank() == 0 else folder_of(checkpoints, info.step)
    weights, moments = content()
    writing = plan_and_copy(weights | ({"optimizer": moments} if moments else {}), moments, folder, what, note)
    writing.start()
    return Begun(writing, info)


def load(state: TrainState, folder: Path) -> CheckpointInfo:
    """Read a checkpoint into this rank's model and optimizer, whatever layout wrote it; every rank calls this.

    Raises:
        UserError: it is not complete, or not of this model.
    """
    with agree(f"reading {folder}"):
        info = read_info(folder)
    wanted, optimizers = _wanted(state)
    loaded = _read(wanted, folder)
    _put(loaded, state.model)
    for i, (optimizer, common) in optimizers.items():
        groups = [{**group, "step": info.adam_steps} for group in common["optimizer"]["param_groups"]]
        optimizer.load_state_dict(
            {
                **common,
                "optimizer": {**common["optimizer"], "param_groups": groups},
                "param_state": loaded["optimizer"][i],
            }
        )
    return info


def load_weights(model: ModelOnRank, folder: Path) -> None:
    """Read what `save_weights` wrote into this rank's model, whatever layout wrote it; every rank calls this.

    Raises:
        UserError: it is not complete, or not of this model.
    """
    with agree(f"reading {folder}"):
        read_info(folder)
    _put(_read(_weights(model.chunks), folder), model)


def _read(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    with agree(f"reading {folder}"):
        try:
            loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
        # Whatever Megatron-Core or torch make of a foreign or damaged file; torch's own error is no `Exception`.
        except (Exception, CheckpointException) as e:
            raise UserError(f"{folder}: the checkpoint cannot be read: {_line(e)}") from e
    return loaded


def _line(error: BaseException) -> str:
    """One line of an error; of those that torch collected from several ranks, the first."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}".partition("\n")[0]


def _put(loaded: dict[str, Any], model: ModelOnRank) -> None:
    for name, chunk in _named(model.chunks).items():
        chunk.load_state_dict(loaded[name])


def adam_steps(optimizer: Any) -> int:
    """Updates that the moments on this rank have seen."""
    for part in _parts(optimizer):
        for group in part.state_dict()["optimizer"]["param_groups"]:
            if group.get("step") is not None:
                return int(group["step"])
    return 0


def _state(state: TrainState) -> tuple[dict[str, Any], dict[int, Any]]:
    """Weights, and copies of the optimizer's state where they are written, as sharded tensors."""
    weights, metadata = _weights(state.model.chunks), _metadata()
    moments = {i: sharded_state(part, weights, metadata) for i, part in enumerate(_parts(state.optimizer))}
    return weights, moments


def _wanted(state: TrainState) -> tuple[dict[str, Any], dict[int, tuple[Any, dict[str, Any]]]]:
    """Where to read into, as sharded tensors; and each optimizer with the rest of its state, which is not on disk."""
    weights, metadata = _weights(state.model.chunks), _metadata()
    moments, rest = {}, {}
    for i, optimizer in enumerate(_parts(state.optimizer)):
        common = optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
        moments[i] = common.pop("param_state")
        rest[i] = (optimizer, common)
    return {**weights, "optimizer": moments}, rest


def _weights(chunks: list[Any]) -> dict[str, Any]:
    """The weights of this rank's chunks, as sharded tensors."""
    metadata = _metadata()
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()}


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _named(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _parts(optimizer: Any) -> list[Any]:
    """Megatron-Core's optimizers on this rank that hold parameters: one for dense weights, one for experts.

    A pipeline stage without experts has one for them all the same, with nothing in it. Asked are the buffers of the
    stage, which its data-parallel ranks share: a rank whose own part of them is empty must still join the others.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False) and part.buffers]
