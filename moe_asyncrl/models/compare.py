"""Whether the weights of one model can stand in for those of another, and where not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec

NOT_OF_THE_WEIGHTS = frozenset(
    {"architecture", "max_position_embeddings", "eos_token_ids", "pad_token_id", "torch_dtype", "mtp_form"}
)
"""Fields that say nothing about what the weights compute."""


def differences(spec: ModelSpec, other: ModelSpec) -> list[str]:
    """What of `other` is not as in `spec`, for people: `vocab_size 300 (not 259)`. Empty if its weights fit."""
    return [
        f"{f.name} {getattr(other, f.name)} (not {getattr(spec, f.name)})"
        for f in fields(ModelSpec)
        if f.name not in NOT_OF_THE_WEIGHTS and getattr(spec, f.name) != getattr(other, f.name)
    ]


def same_vocabulary(directory: Path, other: Path) -> bool:
    """Whether the same ids are the same tokens, by the `tokenizer.json` of both; True where one has none.

    Raises:
        UserError: a file that is no JSON.
    """
    files = [folder / "tokenizer.json" for folder in (directory, other)]
    if not all(file.is_file() for file in files):
        return True
    texts = [file.read_bytes() for file in files]
    return texts[0] == texts[1] or _vocabulary(files[0], texts[0]) == _vocabulary(files[1], texts[1])


def _vocabulary(file: Path, text: bytes) -> Any:
    try:
        found = msgspec.json.decode(text)
        return found["model"]["vocab"], [(t["id"], t["content"]) for t in found.get("added_tokens") or []]
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: not a tokenizer") from None
