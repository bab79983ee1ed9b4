"""What every source is to its readers: prompts by position."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from moe_asyncrl.data.prompt import Prompt


class Rows(Protocol):
    """Prompts by position, from 0. A prompt is made when it is asked for; only its place is kept in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Prompt:
        """Raises UserError that names the row if it cannot be used."""
        ...

    def close(self) -> None: ...


class Chain:
    """Several sources as one, in order."""

    def __init__(self, parts: Sequence[Rows], sizes: Sequence[int] | None = None) -> None:
        """`sizes` takes only so many from the start of each part; all without it."""
        self.parts = tuple(parts)
        self._ends = list(accumulate(len(p) for p in parts) if sizes is None else accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, position: int) -> Prompt:
        part, inside = self.place(position)
        return self.parts[part][inside]

    def place(self, position: int) -> tuple[int, int]:
        """(number of the part, position inside it). Raises IndexError outside."""
        if not 0 <= position < len(self):
            raise IndexError(f"prompt {position} of {len(self)}")
        part = bisect.bisect_right(self._ends, position)
        return part, position - (self._ends[part - 1] if part else 0)

    def close(self) -> None:
        for part in self.parts:
            part.close()
