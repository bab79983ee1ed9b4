"""One checkpoint on its way to disk: planned by all ranks together, then written by a thread of each rank.

    every rank:   plan ─▶ copy to host memory ─▶ (training goes on) ……… agreed: all wrote ─▶ first rank: complete
    its thread:                                └▶ write ─▶ fsync ─┘

Megatron-Core plans the files and knows their format; its own asynchronous writer forks this process, which runs the
threads of gloo or NCCL, so the writing is ours. Only main threads make collectives, in one order on all ranks.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import sync
from moe_asyncrl.weights.agree import agree, lowest_failed
from moe_asyncrl.weights.lockstep import Lockstep

BACKEND = ("torch_dist", 1)
"""Name and version of Megatron-Core's format."""
TURN_S = 1.0
"""Longest time between two looks of a rank that waits: the others are never left longer in a collective."""

Items = list[tuple[Any, Any]]
Note = Callable[[float, float, int, str], None]
"""Told of this rank's writing when it ends: start and end (Unix seconds), bytes, and why it failed, else nothing."""


@dataclass
class Writing:
    """What this rank has still to write of one checkpoint. All ranks make the same calls."""

    folder: Path
    rank: int
    what: str
    """For messages, such as "the checkpoint of step 3"."""
    common: dict[str, Any]
    """What is not sharded; the first rank writes it."""
    writer: Any
    """Megatron-Core's writer, which knows the format."""
    items: Items
    """What is left to write: Megatron-Core's plan for each piece, and its bytes or a tensor that nobody changes."""
    metadata: Any
    """Where each tensor is; on the first rank."""
    collect: Callable[[Any], list[Any] | None]
    """Gathers one object of each rank on the first."""
    note: Note | None = None
    results: list[Any] = field(default_factory=list)
    bytes: int = 0
    problem: str = ""
    """Why this rank could not write."""
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to write. A process that ends does not wait for the thread: a run that fails leaves it unfinished."""
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    @property
    def ended(self) -> bool:
        """Whether this rank's thread is through, well or not."""
        return self.thread is not None and not self.thread.is_alive()

    def all_written(self) -> bool:
        """Whether all ranks have written. Collective; does not wait for the writing.

        Raises:
            UserError: a rank could not; the same message on every rank.
        """
        # Looked at first: a thread that has ended says no more about problems.
        ended = self.ended
        if lowest_failed(self.rank if self.problem else None, f"looking at {self.what}") is not None:
            raise UserError(Lockstep(self.rank, dist.get_world_size()).first_problem(self.problem))
        return lowest_failed(None if ended else self.rank, f"looking at {self.what}") is None

    def wait(self, stall_s: float) -> None:
        """Wait until all ranks have written. Collective.

        Raises:
            UserError: a rank could not, or no byte of its files was written for `stall_s` seconds.
        """
        since, seen = time.monotonic(), -1
        while not self.all_written():
            assert self.thread is not None
            self.thread.join(TURN_S)
            size = self._on_disk()
            if size != seen:
                since, seen = time.monotonic(), size
            elif not self.ended and time.monotonic() - since > stall_s:
                self.problem = self._said(f"nothing was written for {stall_s:g} s")

    def complete(self, seal: Callable[[], None]) -> None:
        """Make the folder a checkpoint once all have written; `seal` is the first rank's last act. Collective.

        Raises:
            UserError: the first rank could not.
        """
        everything = self.collect(self.results)
        with agree(f"completing {self.what}"):
            if everything is None:
                return
            from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

            try:
                self.writer.finish(self.metadata, everything)
                save_config(CheckpointingConfig(*BACKEND), str(self.folder))
                seal()
            except OSError as e:
                raise UserError(self._said(str(e))) from e

    def _run(self) -> None:
        start = time.time()
        try:
            self._write()
        except BaseException as error:  # torch's CheckpointException is no Exception; silence would mean: written
            self.problem = self._said(_reason(error))
        if self.note is not None:
            self.note(start, time.time(), self.bytes, self.problem)

    def _write(self) -> None:
        from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy

        if self.rank == 0:
            get_default_save_common_strategy().save_common(self.common, str(self.folder))
        if not self.items:
            return
        blobs = [entry for entry in self.items if not isinstance(entry[1], torch.Tensor)]
        tensors = [entry for entry in self.items if isinstance(entry[1], torch.Tensor)]
        self.items.clear()
        self.items.extend(reversed(tensors))
        del tensors
        # Without its decorator, which turns Python's garbage collector off in the whole process meanwhile.
        write = inspect.unwrap(self.writer.write_preloaded_data)
        name = f"__{self.rank}_0.distcp"
        answers: queue.Queue[Any] = queue.Queue()
        counter: queue.Queue[Any] = queue.Queue()
        counter.put(0)
        write(
            [self.writer.transforms] if hasattr(self.writer, "transforms") else [],
            local_proc_idx=0,
            write_bucket=(str(self.folder / name), name, (blobs, self._compact())),
            results_queue=answers,
            count_queue=counter,
            use_fsync=True,
        )
        _, written = answers.get_nowait()
        if isinstance(written, Exception):
            raise written
        # Megatron-Core's writer syncs before the last bytes have left its stream, and no other machine can do it here.
        sync(self.folder / name)
        self.results = written
        self.bytes = sum(result.size_in_bytes for result in written)

    def _compact(self) -> Iterator[tuple[Any, Any]]:
        """Each tensor alone: a view would be written with all that it is part of. None is held after it was written."""
        while self.items:
            item, data = self.items.pop()
            yield item, data if data.untyped_storage().nbytes() == data.nbytes else data.clone()

    def _on_disk(self) -> int:
        own = self.folder.glob(f"__{self.rank}_0.distcp")
        return sum(path.stat().st_size for path in own)

    def _said(self, why: str) -> str:
        return f"{self.folder}: rank {self.rank} could not write {self.what}: {why}"


def plan_and_copy(
    content: dict[str, Any], copied: dict[int, Any], folder: Path, what: str, note: Note | None = None
) -> Writing:
    """Plan the files of a sharded state and copy what this rank will write to host memory. Collective.

    Afterwards the state may change. The copy takes as many bytes as this rank's file: of a tensor that several ranks
    have, only the first one's is written. `copied`: the part of the content that is such a copy already.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as torch_format
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan

    ours = {_storage(part.data) for part in nested_values(copied)}
    sharded, common = save_preprocess(content)
    # What `TorchDistSaveShardedStrategy.async_save` does, but for its writer, whose queue is a process that outlives a
    # killed trainer, and whose end cannot tell the other ranks of a full disk.
    by_key, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(sharded, True)
    writer = torch_format.FileSystemWriterAsync(str(folder))
    items: Items = []
    writer.prepare_write_data = lambda plan, planner: items.extend((i, planner.resolve_data(i)) for i in plan.items)
    planned = save_state_dict_async_plan(
        torch_format.mcore_to_pyt_state_dict(by_key, False),
        writer,
        None,
        0,
        planner=torch_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    _, metadata, group = planned[0]
    with agree(f"copying {what} to host memory"):
        items[:] = [(item, _own(data, ours)) for item, data in items]
    return Writing(folder, dist.get_rank(), what, common, writer, items, metadata, group.gather_object, note)


def _own(data: Any, ours: set[int]) -> Any:
    """The same in host memory, where training does not change it."""
    if not isinstance(data, torch.Tensor) or _storage(data) in ours:
        return data
    return data.detach().cpu() if data.device.type != "cpu" else data.detach().clone()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _reason(error: BaseException) -> str:
    """What the system said, also where torch tells of it in words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"
