"""The demo's task: additions. Held-out sums share no pair of numbers with the others, in either order."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec


@dataclasses.dataclass(frozen=True)
class Sum:
    """`a+b=`"""

    a: int
    b: int

    def record(self) -> dict[str, str]:
        """As a prompt line."""
        return {"prompt": f"{self.a}+{self.b}=", "answer": str(self.a + self.b)}


def additions(*, below: int, held_out: int, seed: int) -> tuple[list[Sum], list[Sum]]:
    """(training, held-out) sums of numbers in [0, below), every ordered pair in exactly one of the two.

    An unordered pair goes to one side whole, so that 3+5 is never trained when 5+3 is held out. Raises ValueError if
    there are too few pairs for `held_out` sums.
    """
    pairs = [(a, b) for a in range(below) for b in range(a, below)]
    random.Random(seed).shuffle(pairs)
    kept: list[Sum] = []
    at = 0
    while len(kept) < held_out and at < len(pairs):
        kept += _orders(pairs[at])
        at += 1
    if len(kept) < held_out or at == len(pairs):
        raise ValueError(f"numbers below {below} do not give {held_out} held-out sums and a training set")
    training = [s for pair in pairs[at:] for s in _orders(pair)]
    random.Random(seed + 1).shuffle(training)
    return training, kept[:held_out]


def write_prompts(path: Path, sums: list[Sum]) -> None:
    """Write JSON lines with `prompt` and `answer`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(s.record()) + b"\n" for s in sums))


def _orders(pair: tuple[int, int]) -> list[Sum]:
    a, b = pair
    return [Sum(a, b)] if a == b else [Sum(a, b), Sum(b, a)]
