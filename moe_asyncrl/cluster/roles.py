"""Role name -> the code that runs it. What a role says when it fails goes into its error file, one line."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import time
import traceback

import psutil

from moe_asyncrl.cluster.exporter import exporting
from moe_asyncrl.cluster.gpus import VISIBLE
from moe_asyncrl.cluster.process import error_file
from moe_asyncrl.cluster.run_setup import open_run
from moe_asyncrl.cluster.task import check_interface, gpu_variables, rank_variables, with_host
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.telemetry.run_folder import write_atomic

log = logging.getLogger(__name__)
MODULES = {
    "buffer": "moe_asyncrl.buffer.role",
    "engine": "moe_asyncrl.cluster.engine_role",
    "rollout": "moe_asyncrl.rollout.role",
    "trainer": "moe_asyncrl.train.role",
}


def run_role(role: str, run: str, index: int | None, *, gpus: str | None = None, host: str | None = None) -> int:
    """Run one role until it ends. Returns its exit code; a failure leaves one line in the role's error file.

    `index` of a trainer is its rank, RANK or Slurm's if not given; of another role 0. `gpus` and `host`: see the
    command's help. What they mean for libraries is put into this process's environment.
    """
    folder, recipe = open_run(run)
    if role == "trainer" and index is None:
        os.environ.update(rank_variables(os.environ))
        index = int(os.environ["RANK"])
    index = index or 0
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.Formatter.converter = time.gmtime
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it tells every parameter and field of its settings
    name = role if role == "buffer" else f"{role}-{index}"
    try:
        os.environ.update(gpu_variables(gpus, os.environ))
        check_interface(os.environ, psutil.net_if_addrs())
        node = os.environ.get("SLURMD_NODENAME")
        if node or gpus:
            log.info("%s on %s, GPUs %s", name, node or "this machine", os.environ.get(VISIBLE, "none"))
        recipe = with_host(recipe, role, host)
        with exporting(folder, recipe, name):
            return int(importlib.import_module(MODULES[role]).run(folder, recipe, index))
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        text = " ".join(str(error).split()) or "no message"
        line = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
        print(f"moe-asyncrl role {role}: {line}", file=sys.stderr, flush=True)
        write_atomic(error_file(folder, name), line[:2000].encode())
        return 1
