"""What the names of a checkpoint's tensors tell that its config does not. Headers only, and without torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from moe_asyncrl.models.features import MtpForm

MTP_PREFIX = "mtp."
SOURCE = "source"
"""Folder beside a `config.json` without weights, with what the weights were stored as."""
MTP_FILE = "mtp.json"
_MAX_HEADER = 512 * 1024 * 1024


def mtp_prefixes(num_layers: int, mtp_layers: int) -> tuple[str, ...]:
    """Where multi-token-prediction tensors stand: behind the last layer, one more layer each, or under `mtp.`."""
    return (*(f"model.layers.{num_layers + number}." for number in range(mtp_layers)), MTP_PREFIX)


def mtp_form(names: Collection[str], num_layers: int, mtp_layers: int) -> MtpForm:
    """How multi-token-prediction layers are stored; the usual form where there are none.

    A mixture of forms is told as the one that most of it could be: what does not fit it stands out when names are
    compared with the parameter map.
    """
    *behind, own = mtp_prefixes(num_layers, mtp_layers)
    kept = [name for name in names if name.startswith(tuple(behind))]
    own_prefix = not kept and any(name.startswith(own) for name in names)
    if own_prefix:
        kept = [name for name in names if name.startswith(own)]
    return MtpForm(
        own_prefix=own_prefix,
        stacked=any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in kept),
        copies=not own_prefix
        and (not kept or any(name.endswith(("embed_tokens.weight", "shared_head.head.weight")) for name in kept)),
    )


def remembered_mtp_form(directory: Path) -> MtpForm | None:
    """The form that `SOURCE` beside a config remembers. Raises ValueError or TypeError if the file is damaged."""
    path = directory / SOURCE / MTP_FILE
    return MtpForm(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def stored_names(directory: Path) -> frozenset[str]:
    """Names of the tensors of a safetensors checkpoint; none where there is no whole one.

    Whether its files are whole is for those to say who read them.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        with single.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(length)) if length < _MAX_HEADER else {}) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()
