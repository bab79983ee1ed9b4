"""Which GPU belongs to which role. Ids are whole words (`11`, `GPU-3f…`), never characters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from moe_asyncrl.data.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GIVEN_BY = (VISIBLE, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Where a process finds the GPUs that it may use, the narrowest first."""
BY_RANK = "rank"
"""In place of a position: the one of the process's local rank."""


def parse_ids(text: str) -> tuple[str, ...]:
    """`8,9,10,11` and `[8-9],gpu-12` as words: ("8", "9", "10", "11"). Other names, such as UUIDs, stay as they are.

    Raises `UserError` for a range that runs backwards or an id that is named twice.
    """
    found: list[str] = []
    for word in text.replace("[", "").replace("]", "").split(","):
        word = word.strip()
        ends = re.fullmatch(r"(\d+)-(\d+)", word)
        if ends:
            first, last = int(ends[1]), int(ends[2])
            if last < first:
                raise UserError(f"GPU ids {text!r}: the range {word} runs backwards")
            found += [str(n) for n in range(first, last + 1)]
        elif word.isdigit():
            found.append(str(int(word)))
        elif word:
            found.append(word)
    if len(set(found)) != len(found):
        raise UserError(f"GPU ids {text!r}: one of them is named twice")
    return tuple(found)


def given_ids(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that this process may use; None if nothing limits them."""
    for name in _GIVEN_BY:
        if name in environment:
            return parse_ids(environment[name])
    return None


def parse_positions(text: str, environment: Mapping[str, str]) -> tuple[int, ...]:
    """The argument `--gpus`: positions such as `0,1`, or `rank`. Raises `UserError` for anything else."""
    if text == BY_RANK:
        text = environment.get("LOCAL_RANK", "")
        if not text.isdigit():
            raise UserError("--gpus rank: LOCAL_RANK is not set")
    words = parse_ids(text)
    if not words or not all(word.isdigit() for word in words):
        raise UserError(f"--gpus {text}: expected positions such as 0,1 or `rank`")
    return tuple(int(word) for word in words)


def pick(given: Sequence[str] | None, positions: Sequence[int]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for a role at `positions` among the `given` ids (all of the machine if None).

    Raises `UserError` if there are fewer.
    """
    if given is None:
        return ",".join(str(p) for p in positions)
    if max(positions) >= len(given):
        have = f"only {','.join(given)}" if given else "none"
        raise UserError(f"this role needs {max(positions) + 1} GPUs on its node, and the process may use {have}")
    return ",".join(given[p] for p in positions)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Positions among a machine's GPUs: one tuple a role. Empty tuples on a machine without GPUs."""

    trainers: tuple[tuple[int, ...], ...]
    """By local rank."""
    engines: tuple[tuple[int, ...], ...]
    """By the engine's number on this machine; `tp` each."""


def place(gpus: int, *, ranks: int, engines: int, tp: int, colocated: bool = False) -> Placement:
    """Trainer ranks take the first GPUs, one each; the engines follow, `tp` neighbours each. Nobody shares.

    `colocated`: the engines begin at the first GPU as well, and take turns with the trainer.

    Raises `UserError` if `gpus` (above 0) are too few; 0 means a machine without GPUs, where nothing is assigned.
    """
    if gpus == 0:
        return Placement(trainers=((),) * ranks, engines=((),) * engines)
    need = max(ranks, engines * tp) if colocated else ranks + engines * tp
    if need > gpus:
        rule = "engines share those of the trainer and not each other's" if colocated else "a GPU is never shared"
        raise UserError(
            f"{ranks} trainer ranks and {engines} engines with tp {tp} need {need} GPUs, there are {gpus}: {rule}; "
            "lower trainer.dp, engine.count or engine.tp"
        )
    first = 0 if colocated else ranks
    return Placement(
        trainers=tuple((rank,) for rank in range(ranks)),
        engines=tuple(tuple(range(first + j * tp, first + (j + 1) * tp)) for j in range(engines)),
    )


def count_usable() -> int:
    """GPUs that PyTorch can use in this process; 0 without a driver or with PyTorch's CPU build."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
