"""What starts one SGLang server: its command line and environment, as a pure function of values."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import msgspec

from moe_asyncrl.engine.plugin import MODE_VARIABLE

ONPATH = pathlib.Path(__file__).parent / "plugin" / "onpath"
API_KEY_VARIABLE = "MOE_ASYNCRL_ENGINE_API_KEY"
SERVE = "moe_asyncrl.engine.plugin.serve"


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One server. Sizes are in tokens, requests or ranks as each field says."""

    model: str
    """HF directory."""
    port: int
    """0 lets the system choose when the server starts."""
    python: str
    """Interpreter that has SGLang; it may belong to another environment."""
    host: str = "127.0.0.1"
    dtype: str = "float32"
    """Weights and activations: `float32`, `bfloat16` or `float16`."""
    tp: int = 1
    """Tensor-parallel ranks: processes of this server."""
    ep: int = 1
    """Expert-parallel ranks among them; divides `tp`."""
    moe: bool = True
    """The model routes: the server records the experts of every token."""
    context_length: int | None = None
    """Tokens of one sequence; None takes the model's own."""
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    """KV slots, in tokens. None: SGLang's choice on a GPU, 65,536 on a CPU."""
    mem_fraction: float | None = None
    """Share of memory for weights and KV cache. None: SGLang's choice on a GPU, at most 0.3 of the machine on a CPU."""
    random_seed: int = 0
    weight_version: int = -1
    """Label of the weights in `model`; -1 before the first commit."""
    tokenizer: bool = False
    """Load the tokenizer, for text in and out and stop strings.

    Without it the server takes and gives token ids only.
    """
    api_key: str | None = None
    mask_tokens: int | None = None
    """Most tokens that a sampling mask may keep; None is SGLang's default."""
    metrics: bool = False
    """Serve SGLang's own figures for Prometheus under /metrics, which needs no key."""
    colocated: bool = False
    """It shall be able to give its memory back, which on a GPU needs SGLang's memory saver."""
    cores: tuple[int, ...] = ()
    """CPU only: one core per rank; required when `tp` is above 1."""
    extra_args: tuple[str, ...] = ()
    """Appended as they are, so they win over ours."""
    extra_env: dict[str, str] = {}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """argv of the child, and what to set in its environment (on top of ours)."""

    argv: tuple[str, ...]
    env: dict[str, str]


def build_command(args: EngineArgs, *, cpu: bool) -> Command:
    """The command for a CPU or a GPU machine. Raises ValueError on values that contradict each other."""
    if args.ep > 1 and args.tp % args.ep:
        raise ValueError(f"engine: ep={args.ep} does not divide tp={args.tp}")
    argv = [
        args.python, "-m", SERVE,
        "--model-path", args.model,
        "--host", args.host,
        "--port", str(args.port),
        "--dtype", args.dtype,
        "--tp-size", str(args.tp),
        "--ep-size", str(args.ep),
        "--random-seed", str(args.random_seed),
        "--max-running-requests", str(args.max_running_requests),
        f"--weight-version={args.weight_version}",
        "--skip-server-warmup",
        "--log-level-http", "warning",
    ]  # fmt: skip
    if args.moe:
        argv.append("--enable-return-routed-experts")
    if args.colocated and not cpu:
        argv.append("--enable-memory-saver")
    if args.metrics:
        argv.append("--enable-metrics")
    if not args.tokenizer:
        argv.append("--skip-tokenizer-init")
    if args.context_length is not None:
        argv += ["--context-length", str(args.context_length)]
    if args.mask_tokens is not None:
        argv += ["--sampling-mask-max-tokens", str(args.mask_tokens)]
    tokens, fraction = args.max_total_tokens, args.mem_fraction
    env = {MODE_VARIABLE: "cpu" if cpu else "gpu"}
    if cpu:
        tokens = tokens or 65536
        fraction = fraction or 0.3
        argv += [
            "--device", "cpu",
            "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch",
            "--grammar-backend", "none",
            "--disable-cuda-graph",
            "--disable-overlap-schedule",
            # A waiting scheduler otherwise polls on a full core, which the trainer needs.
            "--sleep-on-idle",
        ]  # fmt: skip
        env |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            # Some routers are compiled otherwise, and the compiler needs Triton.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        if args.tp > 1:
            if len(args.cores) != args.tp:
                raise ValueError(f"engine: tp={args.tp} on a CPU needs {args.tp} cores, got {list(args.cores)}")
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(c) for c in args.cores)
    if tokens is not None:
        argv += ["--max-total-tokens", str(tokens)]
    if fraction is not None:
        argv += ["--mem-fraction-static", str(fraction)]
    if args.api_key is not None:
        # Not an argument: every user of the machine can read those.
        env[API_KEY_VARIABLE] = args.api_key
    argv += args.extra_args
    return Command(argv=tuple(argv), env=env | args.extra_env)


def spread_cores(tp: int, index: int, available: tuple[int, ...]) -> tuple[int, ...]:
    """Cores for the `tp` ranks of the `index`-th engine of a machine: neighbours, wrapping round."""
    return tuple(available[(index * tp + r) % len(available)] for r in range(tp))


def child_environment(base: Mapping[str, str], command: Command) -> dict[str, str]:
    """The whole environment of the child: `base`, the command's settings, and our plugin folder first on the path."""
    env = {**base, **command.env}
    rest = base.get("PYTHONPATH", "")
    env["PYTHONPATH"] = f"{ONPATH}{os.pathsep}{rest}" if rest else str(ONPATH)
    return env
