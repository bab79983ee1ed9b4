"""The account of a conversion: everything that was expected came exactly once, and nothing else did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moe_asyncrl.data.errors import UserError


class Ledger:
    """Counts names against an expected set. `settle` raises unless the two agree."""

    def __init__(self, expected: Iterable[str], *, what: str, where: str) -> None:
        self._expected = set(expected)
        self._seen: Counter[str] = Counter()
        self._what, self._where = what, where

    def enter(self, name: str) -> None:
        """Record one name."""
        self._seen[name] += 1

    def settle(self) -> None:
        """Raise UserError with the whole list of missing, extra and repeated names, if there are any."""
        problems = (
            ("missing", sorted(self._expected - self._seen.keys())),
            ("unexpected", sorted(self._seen.keys() - self._expected)),
            ("more than once", sorted(name for name, count in self._seen.items() if count > 1)),
        )
        found = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in problems if names]
        if found:
            raise UserError(f"{self._where}: {self._what} do not match the model; {'; '.join(found)}")
