"""Checks in fresh processes for little money: what Megatron-Core imports of others is imported once, and each check
runs in a fork of its own, which imports Megatron-Core itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import megatron_patches
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.parallel import ParallelRuntime
from tests.pool.machine import CPU
from tests.pool.pipes import receive, send

RANK_TIMEOUT_S = 60.0


def in_fork(function: Callable[[], Any], timeout_s: float) -> str:
    """Run a function in a fork of this process: '' if it returned, the last line of what it raised, or 'hung'."""
    ours, theirs = get_context("fork").Pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # a group of its own, so that whatever a check leaves behind can be ended with it
        try:
            function()
            theirs.send("")
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            theirs.send(f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
        signal.pause()  # until the parent has read the answer
    theirs.close()
    ready = connection.wait([ours], timeout_s)
    try:
        answer: str = ours.recv() if ready else "hung"
    except EOFError:
        answer = "died"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer


def on_ranks(layout: Layout, function: Callable[[], Any]) -> list[Any]:
    """Run a function on each rank of a layout, in forks of this process; the results by rank."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(layout.world_size):
            ours, theirs = context.Pipe()
            child = context.Process(target=_rank, args=(theirs, rank, layout, str(Path(folder) / "store"), function))
            child.start()
            theirs.close()
            pipes.append((child, ours))
        results = []
        try:
            for rank, (_, pipe) in enumerate(pipes):
                if not pipe.poll(RANK_TIMEOUT_S):
                    raise TimeoutError(f"rank {rank} of {layout} hung")
                error, result = receive(pipe)
                if error:
                    raise RuntimeError(f"rank {rank} of {layout}: {error}")
                results.append(result)
        finally:
            for child, _ in pipes:
                child.kill()
                child.join()
    return results


def _rank(pipe: connection.Connection, rank: int, layout: Layout, store: str, function: Callable[[], Any]) -> None:
    try:
        enter(layout, rank, store)
        send(pipe, ("", function()))
    except Exception as error:
        send(pipe, (f"{type(error).__name__}: {error}", None))


def enter(layout: Layout, rank: int, store: str) -> None:
    """Form a layout's process groups in this process, over a file."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    ranks = layout.world_size
    runtime = ParallelRuntime(CPU, rank=rank, world_size=ranks, store=FileStore(store, ranks), timeout_s=RANK_TIMEOUT_S)
    runtime.setup(layout)


def main() -> None:
    """Run every check twice, with all patches and with its own left out; print both outcomes as JSON, by patch."""
    for library in ("wandb", "tensorboard.compat"):  # Megatron-Core takes them where they are installed
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    checks = importlib.import_module("tests.megatron_patches.checks").CHECKS
    outcomes: dict[str, dict[str, str]] = {}
    for name, check in checks.items():
        outcomes[name] = {}
        for label, left_out in (("with", ()), ("without", (name,))):

            def run(check: Any = check, left_out: tuple[str, ...] = left_out) -> None:
                # The runtime inside a check applies the same set again, which changes nothing.
                applied = megatron_patches.apply(CPU, leave_out=left_out)
                megatron_patches.apply = lambda *_, **__: applied
                check()

            outcomes[name][label] = in_fork(run, timeout_s=120)
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
