"""Faults that strike in a chosen phase of an update: signals to processes, and a bit that flips on its way."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_asyncrl.weights import rounds
from tests.weights.jobs import HELD, publish
from tests.weights.storm_jobs import set_version


def arm(rank: int, phase: str, turn: int, number: int, pid: int | None = None, group: bool = False) -> None:
    """On one rank, as soon as the phase (of `send`: the round) begins: signal `number` to a process or its group.

    `pid`: None is this rank itself. It happens once.
    """
    HELD.pop("strike", None)
    HELD.pop("struck", None)
    if dist.get_rank() != rank:
        return

    def strike(at: str, now: int) -> None:
        if (at, now) == (phase, turn) and "struck" not in HELD:
            HELD["struck"] = time.time()
            (os.killpg if group else os.kill)(pid or os.getpid(), number)

    HELD["strike"] = strike


def publish_version(version: int, notes: str | None = None) -> dict[str, Any]:
    """Weights of this version to the engines. `notes`: a folder where each rank says how it ended.

    `struck` is the Unix time of what was armed here.
    """
    set_version(version)
    began = time.time()
    found = {**publish(version), "began": began, "ended": time.time(), "struck": HELD.get("struck")}
    if notes is not None:
        Path(notes, f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    return found


def set_epoch(back: int) -> None:
    """The first rank takes itself for the trainer of an epoch that lies `back` behind its own."""
    if dist.get_rank() == 0:
        HELD["publisher"]._epoch -= back


def flip_bit(rank: int, number: int) -> None:
    """One bit of the payload of one message of a rank, after it was sealed; once."""
    right = rounds.seal
    if dist.get_rank() != rank:
        return

    def seal(buffer: Any, **fields: Any) -> bytes:
        digest = right(buffer, **fields)
        if fields["number"] == number:
            buffer[-7] ^= 16
            rounds.seal = right
        return digest

    rounds.seal = seal


def pids() -> int:
    """This rank's process."""
    return os.getpid()
