"""The two tasks of the end-to-end benchmark, as values: what both sides are given.

short: additions, answers of 4 tokens. long: the prompt sets the length of its answer, drawn log-normal with a mean of
64 tokens, at most 512; the sampler does not stop earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from moe_asyncrl.cluster.demo import NUMBERS_BELOW
from moe_asyncrl.data.arithmetic import additions

LENGTH_MEAN = 64.0
LENGTH_SIGMA = 1.0
LENGTH_MAX = 512
LONG_PROMPTS = 4000


@dataclass(frozen=True)
class Task:
    """One batch is `groups` prompts with `group_size` answers each."""

    name: str
    groups: int
    max_new_tokens: int
    long_tailed: bool
    """Each prompt sets its own length, at most `max_new_tokens`."""
    group_size: int = 8


TASKS = {
    "short": Task("short", groups=64, max_new_tokens=4, long_tailed=False),
    "long": Task("long", groups=32, max_new_tokens=LENGTH_MAX, long_tailed=True),
}


def answer_lengths(count: int, seed: int) -> np.ndarray:
    """Log-normal lengths in [1, LENGTH_MAX], int64 [count], whose mean before the cap is LENGTH_MEAN."""
    mu = math.log(LENGTH_MEAN) - LENGTH_SIGMA**2 / 2
    drawn = np.random.default_rng(seed).lognormal(mu, LENGTH_SIGMA, count)
    return np.clip(np.rint(drawn), 1, LENGTH_MAX).astype(np.int64)


def prompt_lines(task: Task, seed: int) -> list[bytes]:
    """The task's prompts as JSON lines, in the order in which both sides take them; long-tailed ones with `length`."""
    training, _ = additions(below=NUMBERS_BELOW, held_out=10, seed=seed)
    if not task.long_tailed:
        return [msgspec.json.encode(s.record()) for s in training]
    some = training[:LONG_PROMPTS]
    lengths = answer_lengths(len(some), seed)
    return [msgspec.json.encode({**s.record(), "length": int(n)}) for s, n in zip(some, lengths, strict=True)]


def beginning_with(lines: Sequence[bytes], batch: int, task: Task) -> list[bytes]:
    """The prompts rotated so that batch `batch` (of the order that `lines` stand in; may be negative) comes first."""
    at = batch * task.groups % len(lines)
    return [*lines[at:], *lines[:at]]


def write_lines(path: Path, lines: Sequence[bytes]) -> Path:
    """A prompt file."""
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
