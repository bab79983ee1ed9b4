"""Which transport an update takes: NCCL where both sides have the same one, else gloo. A pure choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from moe_asyncrl.data.errors import UserError

Transport = Literal["nccl", "gloo"]


def choose_transport(wanted: str, own: str, engines: Mapping[str, str]) -> Transport:
    """The transport for a trainer with NCCL version `own` and engines with theirs (by name); "" means no NCCL.

    `auto` takes gloo where somebody lacks NCCL or has another version. Raises UserError if `nccl` was asked for and
    cannot be had: two versions of NCCL in one collective hang or corrupt instead of failing.
    """
    if wanted == "gloo":
        return "gloo"
    lacking = [name for name, version in {"the trainer": own, **engines}.items() if not version]
    differing = {name: version for name, version in engines.items() if version != own}
    if not lacking and not differing:
        return "nccl"
    if wanted == "auto":
        return "gloo"
    if lacking:
        raise UserError(f"weights.backend is nccl, but {', '.join(lacking)} has no NCCL; set it to auto or gloo")
    listed = ", ".join(f"{name} has {version}" for name, version in sorted(differing.items()))
    raise UserError(
        f"weights.backend is nccl, but the trainer has NCCL {own} and {listed}; "
        "give trainer and engines the same PyTorch, or set weights.backend to gloo"
    )


def own_nccl_version() -> str:
    """NCCL version of this process's PyTorch, as `2.27.3`; "" without a GPU or without NCCL."""
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(part) for part in version)
