"""Run every path that only a GPU can run, each in a process of its own with a deadline, and print one line each.

`make gpu-check`. Exit code 0: all ran and passed; 1: one failed; 3: none failed, but one could not be run here.
docs/gpu.md lists the paths and what each one checks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_asyncrl.config.capability import Capabilities, detect_capabilities
from moe_asyncrl.data.errors import UserError

Need = Literal["nccl", "transformer_engine", "apex", "grouped_gemm", "fused_weight_gradient", "sglang"]
Outcome = Literal["ok", "FAILED", "not run"]


@dataclass(frozen=True, kw_only=True)
class GpuPath:
    """One path: where its check is, and what it needs to run."""

    name: str
    check: str
    """`module:function`, called with the `Capabilities`; returns one line of evidence, raises on any failure."""
    deadline_s: float
    needs: tuple[Need, ...] = ()
    gpus: int = 1


@dataclass(frozen=True)
class Result:
    """What became of one path."""

    path: GpuPath
    outcome: Outcome
    line: str
    """The evidence, the failure, or what is missing."""
    seconds: float = 0.0


_TRAIN, _WEIGHTS, _ENGINE = (
    "moe_asyncrl.train.gpu_paths",
    "moe_asyncrl.weights.gpu_paths",
    "moe_asyncrl.engine.gpu_paths",
)
# The deadlines add up to less than ten minutes: that is the promise of `make gpu-check`.
PATHS: tuple[GpuPath, ...] = (
    GpuPath(name="te-layers", check=f"{_TRAIN}:te_layers", needs=("transformer_engine",), deadline_s=60),
    GpuPath(name="te-packed", check=f"{_TRAIN}:te_packed", needs=("transformer_engine",), deadline_s=60),
    GpuPath(
        name="grouped-gemm", check=f"{_TRAIN}:grouped_gemm", needs=("transformer_engine", "grouped_gemm"), deadline_s=60
    ),
    GpuPath(name="fused-adam-te", check=f"{_TRAIN}:fused_adam_te", needs=("transformer_engine",), deadline_s=25),
    GpuPath(name="fused-adam-apex", check=f"{_TRAIN}:fused_adam_apex", needs=("apex",), deadline_s=25),
    GpuPath(
        name="gradient-accumulation-fusion",
        check=f"{_TRAIN}:gradient_accumulation_fusion",
        needs=("fused_weight_gradient",),
        deadline_s=60,
    ),
    GpuPath(name="nccl-broadcast", check=f"{_WEIGHTS}:nccl_broadcast", needs=("nccl",), deadline_s=30),
    GpuPath(name="sglang-serve", check=f"{_ENGINE}:serve", needs=("sglang",), deadline_s=95),
    GpuPath(name="sglang-update", check=f"{_ENGINE}:update", needs=("sglang", "nccl"), gpus=2, deadline_s=95),
    GpuPath(name="sglang-sleep", check="moe_asyncrl.engine.gpu_sleep:sleep", needs=("sglang",), deadline_s=84),
)


def why_not(path: GpuPath, capabilities: Capabilities, *, sglang: bool) -> str | None:
    """What is missing for the path to run, in words; None if it can."""
    if not capabilities.cuda:
        return "no CUDA device"
    if capabilities.gpu_count < path.gpus:
        return f"needs {path.gpus} GPUs, there is {capabilities.gpu_count}"
    for need in path.needs:
        if not (sglang if need == "sglang" else getattr(capabilities, need)):
            reason = capabilities.missing.get(need)
            return f"{need} is not installed here" if reason is None else f"{need}: {reason}"
    return None


def run_path(path: GpuPath, *, python: str = sys.executable) -> Result:
    """Run one path in a process group of its own; kill all of it when it ends or its deadline has passed."""
    start = time.monotonic()
    process = subprocess.Popen(
        [python, "-m", "moe_asyncrl.cluster.gpu_check", "--inside", path.check],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=path.deadline_s)
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "it printed nothing")
        outcome: Outcome = "ok" if process.returncode == 0 else "FAILED"
    except subprocess.TimeoutExpired:
        outcome, last = "FAILED", f"no result after {path.deadline_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return Result(path, outcome, last, time.monotonic() - start)


def describe(result: Result) -> str:
    """One line for a person."""
    took = f" ({result.seconds:.0f} s)" if result.outcome != "not run" else ""
    return f"{result.path.name}: {result.outcome}{took}: {result.line}"


def exit_code(results: Sequence[Result]) -> int:
    """0: all passed; 1: one failed; 3: none failed, one was not run."""
    outcomes = {result.outcome for result in results}
    return 1 if "FAILED" in outcomes else 3 if "not run" in outcomes else 0


def check_all(paths: Sequence[GpuPath], capabilities: Capabilities, *, sglang: bool) -> list[Result]:
    """Run what can run, printing each line as soon as it is known."""
    results = []
    for path in paths:
        missing = why_not(path, capabilities, sglang=sglang)
        result = run_path(path) if missing is None else Result(path, "not run", missing)
        print(describe(result), flush=True)
        results.append(result)
    return results


def _inside(check: str) -> int:
    """In the path's own process: print the evidence, or the error, as the last line."""
    module, _, function = check.partition(":")
    run: Callable[[Capabilities], str] = getattr(importlib.import_module(module), function)
    try:
        print(run(detect_capabilities()))
    except Exception as error:
        if not isinstance(error, UserError):
            import traceback

            traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Run every path that only a GPU can run.")
    parser.add_argument("--only", metavar="NAME", choices=[p.name for p in PATHS], help="run this path alone")
    parser.add_argument("--list", action="store_true", help="name the paths and what each needs")
    parser.add_argument("--inside", metavar="MODULE:FUNCTION", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.inside:
        sys.path.insert(0, str(Path.cwd()))
        return _inside(arguments.inside)
    paths = [p for p in PATHS if arguments.only in (None, p.name)]
    if arguments.list:
        for path in paths:
            print(f"{path.name}: {path.gpus} GPU{'s' if path.gpus > 1 else ''}, {', '.join(path.needs)}")
        return 0
    results = check_all(paths, detect_capabilities(), sglang=importlib.util.find_spec("sglang") is not None)
    code = exit_code(results)
    counts = {o: sum(r.outcome == o for r in results) for o in ("ok", "FAILED", "not run")}
    print(f"gpu-check: {counts['ok']} ok, {counts['FAILED']} failed, {counts['not run']} not run")
    return code


if __name__ == "__main__":
    sys.exit(main())
