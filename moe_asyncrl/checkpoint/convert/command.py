"""What `moe-asyncrl convert` does with its arguments."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from moe_asyncrl.data.errors import UserError


def convert_command(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where `verify` or `diff` found a difference. Raises UserError."""
    try:
        return _WHAT[args.what](args)
    except KeyboardInterrupt:
        if args.what in ("hf-to-megatron", "megatron-to-hf"):
            print("interrupted; the same command goes on from what is done", file=sys.stderr)
        raise


def _to_megatron(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.convert.convert import hf_to_megatron

    out = Path(args.out)
    hf_to_megatron(Path(args.source), out, mtp=args.mtp or "unsaid", layer_keys=args.layer_keys, workers=args.workers)
    print(out)
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.convert.convert import megatron_to_hf

    if not 0 < args.shard_gb < math.inf:
        raise UserError(f"--shard-gb is {args.shard_gb}; it must be above 0 and finite")
    if args.form == "fp8" and args.dtype is not None:
        raise UserError("--form fp8 gives every tensor the type that was published; leave --dtype out")
    out = Path(args.out)
    megatron_to_hf(
        Path(args.source),
        out,
        config=_path(args.config),
        mtp=args.mtp or "unsaid",
        dtype=args.dtype,
        shard_bytes=int(args.shard_gb * 1e9),
        form=args.form,
        workers=args.workers,
    )
    print(out)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.convert.look import inspect_lines

    for line in inspect_lines(Path(args.path), config=_path(args.config), mtp=args.mtp, keys=args.keys):
        print(line)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.convert.compare import verify

    same = verify(Path(args.a), _path(args.b), config=_path(args.config), mtp=args.mtp, workers=args.workers, say=_say)
    return 0 if same else 1


def _diff(args: argparse.Namespace) -> int:
    from moe_asyncrl.checkpoint.convert.compare import diff

    same = diff(Path(args.a), Path(args.b), config=_path(args.config), mtp=args.mtp, workers=args.workers, say=_say)
    return 0 if same else 1


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


def _say(line: str) -> None:
    print(line, flush=True)


_WHAT = {
    "hf-to-megatron": _to_megatron,
    "megatron-to-hf": _to_hf,
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
}
