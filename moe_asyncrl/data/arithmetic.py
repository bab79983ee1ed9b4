"""The demo's task: additions. Held-out sums share no pair of numbers with the others, in either order.

The warm-up imitates a careless pupil, who adds digit by digit and often forgets every carry. So the policy starts with
a habit that is wrong wherever a sum carries, and a right answer that it gives too seldom: what reinforcement learning
is for.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec


@dataclasses.dataclass(frozen=True)
class Sum:
    """`07+35=`: both numbers below 100, written with two digits, so that equal places stand at equal positions."""

    a: int
    b: int

    def record(self) -> dict[str, str]:
        """As a prompt line."""
        return {"prompt": f"{self.a:02d}+{self.b:02d}=", "answer": str(self.a + self.b)}


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


def without_carries(a: int, b: int) -> int:
    """The sum of two numbers digit by digit, every carry forgotten: 57 and 65 give 12."""
    result, place = 0, 1
    while a or b:
        result += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return result


def careless(sums: list[Sum], *, forgets: float, times: int, seed: int) -> list[dict[str, str]]:
    """Each sum as a careless pupil answers it `times` times: all carries forgotten with probability `forgets`."""
    draw = random.Random(seed)
    return [
        {**s.record(), "answer": str(without_carries(s.a, s.b) if draw.random() < forgets else s.a + s.b)}
        for _ in range(times)
        for s in sums
    ]


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))


def write_prompts(path: Path, sums: list[Sum]) -> None:
    """Write JSON lines with `prompt` and `answer`."""
    write_lines(path, [s.record() for s in sums])


def _orders(pair: tuple[int, int]) -> list[Sum]:
    a, b = pair
    return [Sum(a, b)] if a == b else [Sum(a, b), Sum(b, a)]
