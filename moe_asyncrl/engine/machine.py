"""What the engine's own interpreter sees of the machine. It may belong to another environment than ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from moe_asyncrl.data.errors import UserError

PROBE_S = 120.0
NVIDIA_DEVICE = Path("/dev/nvidiactl")
_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
nccl = cuda and torch.distributed.is_nccl_available()
print(json.dumps({"cuda": cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""}))
"""


class EngineMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server will run."""

    cuda: bool = False
    nccl: str = ""
    """NCCL version of the engine's PyTorch, as `2.27.3`; empty without a GPU or without NCCL."""


def look_at_machine(python: str, *, device: Path = NVIDIA_DEVICE) -> EngineMachine:
    """Ask the engine's interpreter; without an NVIDIA driver there is nothing to ask. Raises UserError if it fails."""
    if not device.exists():
        return EngineMachine()
    try:
        found = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, timeout=PROBE_S, check=True, stdin=subprocess.DEVNULL
        )
        return msgspec.json.decode(found.stdout.strip().splitlines()[-1], type=EngineMachine)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"engine.python {python}: PyTorch cannot be used there: {last}") from None
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError, IndexError) as error:
        raise UserError(f"engine.python {python}: PyTorch cannot be used there: {error}") from None
