"""One resident worker: runs calls that arrive on its pipe, keeps its process groups, and dies with its parent."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import os
import select
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from moe_asyncrl.models.layout import Layout
from tests.pool.pipes import receive, send


@dataclass(frozen=True)
class Call:
    """One function to run on each rank, within the process groups of a layout."""

    target: str
    """`package.module:function`."""
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    store: tuple[str, int]
    """Host and port of the store at which the ranks meet."""
    meeting: str
    """The same for all calls that may share process groups; a new one makes the workers form them anew."""
    layout: Layout
    seed: int
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """What a worker sends back: a result, or the text of what it raised."""

    result: Any = None
    error: str = ""


@dataclass
class Groups:
    """The process groups of a worker, and the meeting at which they were formed."""

    meeting: str = ""
    runtime: Any = field(default=None)

    def enter(self, call: Call) -> None:
        """Form the groups that a call needs, or keep those that are there."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from moe_asyncrl.train.parallel import ParallelRuntime
        from tests.pool.machine import CPU

        if self.runtime is not None and (call.meeting != self.meeting or call.layout != self.runtime.layout):
            self.runtime.close()
            drop_groups()
        if call.meeting != self.meeting:
            store = PrefixStore(call.meeting, TCPStore(*call.store, is_master=False))
            self.runtime = ParallelRuntime(
                CPU, rank=call.rank, world_size=call.world_size, store=store, timeout_s=call.timeout_s
            )
            self.meeting = call.meeting
        self.runtime.setup(call.layout, seed=call.seed)


def drop_groups() -> None:
    """Take the process groups of earlier calls from the models that still hold them: each group has threads of its own.

    Megatron-Core's DistributedDataParallel keeps itself, and so its groups, alive through hooks on autograd nodes, a
    circle that Python's collector does not see. In a process with one model, as in training, that is no harm.
    """
    import torch

    group = torch._C._distributed_c10d.ProcessGroup
    for held in gc.get_objects():
        ours = str(type(held).__module__).startswith(("megatron", "moe_asyncrl"))
        fields = vars(held) if ours and hasattr(held, "__dict__") else held
        if type(fields) is dict:
            for name in [n for n, value in fields.items() if isinstance(value, group)]:
                fields[name] = None
    gc.collect()


def run_call(call: Call, groups: Groups) -> Answer:
    """Run one call; whatever it raises becomes text, since an exception may not survive the pipe."""
    try:
        groups.enter(call)
        module, _, function = call.target.partition(":")
        job = getattr(importlib.import_module(module), function)
        given = {"layout": call.layout} if "layout" in inspect.signature(job).parameters else {}
        return Answer(result=job(**given, **call.kwargs))
    except Exception:
        groups.meeting = ""  # the other ranks may be anywhere inside a collective
        return Answer(error=traceback.format_exc())


def die_with(owner: int) -> None:
    """End this process when the process `owner` ends, also while a call is running.

    The kernel's parent-death signal would not do: the parent is the fork server, which lives as long as its workers.
    """
    watched = os.pidfd_open(owner)

    def wait() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def serve(pipe: Connection, log_path: str, owner: int) -> None:
    """Answer calls until the pipe closes. All output goes to `log_path`; SIGUSR1 adds the main thread's stack to it."""
    try:
        die_with(owner)
    except ProcessLookupError:
        os._exit(1)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115  the process's own output, open to its end
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    gc.freeze()  # what was imported stays: no search through it when groups are dropped
    groups = Groups()
    while True:
        try:
            call = receive(pipe)
        except (EOFError, OSError):
            os._exit(0)
        answer = run_call(call, groups)
        try:
            send(pipe, answer)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)
        except Exception as error:  # a result that cannot travel
            send(pipe, Answer(error=f"the result of {call.target} cannot be sent: {error!r}"))
