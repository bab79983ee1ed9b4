"""Fault: each checkpoint save forks writer processes and spawns a queue manager.

Seen in Megatron-Core 0.16.1, `dist_checkpointing.strategies.filesystem_async`, for synchronous saves too.
Effect: a fork of a process that runs gloo threads can deadlock; the spawned manager runs the caller's `__main__`
again, unless it has a guard, and costs seconds.
Mending: on a CPU the files are written one after the other in the calling process, still synced to the disk.
"""

from __future__ import annotations

import queue
from types import ModuleType
from typing import Any

from megatron_patches.patch import Patch, on_cpu


def _mend(module: ModuleType) -> None:
    writer = module.FileSystemWriterAsync

    def write_in_process(
        transform_list: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], global_results_queue: Any
    ) -> None:
        results: Any = {}
        for index, bucket in enumerate(write_buckets):
            answers: queue.Queue[Any] = queue.Queue()
            counter: queue.Queue[Any] = queue.Queue()
            counter.put(index)
            writer.write_preloaded_data(
                transform_list,
                local_proc_idx=index,
                write_bucket=bucket,
                results_queue=answers,
                count_queue=counter,
                use_fsync=True,
            )
            _, written = answers.get_nowait()
            if isinstance(written, Exception):
                results = written
                break
            results[index] = written
        global_results_queue.put(results)

    writer.write_preloaded_data_multiproc = staticmethod(write_in_process)
    module._results_queue = queue.Queue()  # type: ignore[attr-defined]


PATCH = Patch(
    name="checkpoint_writer",
    seen_in="megatron-core 0.16.1",
    modules=("megatron.core.dist_checkpointing.strategies.filesystem_async",),
    applies=on_cpu,
    after=_mend,
)
