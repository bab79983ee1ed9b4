"""Sizes of published models, as `configs/models/*.yaml` state them: an HF config, and what the publisher says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.counts import Counts
from moe_asyncrl.models.spec import ModelSpec

Part = Literal["embedding", "output", "mtp"]


class Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A publisher's number of parameters and what it counts; the words are ours where the publisher has none."""

    stated: str
    """As published: `671B`, `1T`."""
    leaves_out: tuple[Part, ...] = ("mtp",)
    """What the number does not count."""
    cut: bool = False
    """Further digits were cut off, not rounded."""

    def agrees(self, number: int) -> bool:
        """Whether `number` is the stated one to its rounding."""
        digits, unit = self.stated[:-1], {"B": 10**9, "T": 10**12}[self.stated[-1]]
        _, _, decimals = digits.partition(".")
        last = unit / 10 ** len(decimals)
        if not decimals and digits.endswith("0"):
            last *= 10  # 230B: two digits are meant
        above = number - float(digits) * unit
        return 0 <= above < last if self.cut else abs(above) <= last / 2


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    total: Stated
    active: Stated
    config: dict[str, Any]


@dataclass(frozen=True)
class Published:
    """One published model."""

    spec: ModelSpec
    total: Stated
    active: Stated


def read_published(path: Path, **changes: Any) -> Published:
    """Read one file; `changes` replace fields of its config. Raises UserError naming the file."""
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: {error}") from error
    spec = ModelSpec.from_hf_config({**found.config, **changes}, source=str(path))
    return Published(spec, found.total, found.active)


def counted(counts: Counts, stated: Stated) -> tuple[int, int]:
    """(total, active) parameters without what `stated` leaves out."""
    left = sum(getattr(counts, part) for part in stated.leaves_out if part != "mtp")
    mtp = 0 if "mtp" in stated.leaves_out else counts.mtp
    return counts.total - left + mtp, counts.active - left
