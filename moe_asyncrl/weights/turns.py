"""Whose turn it is where trainer and engines share their devices. Pure.

engines ─rest▶ trainer ─weights▶ update ─cache▶ committed ─go_on▶ engines

engines     generate; at the start, and after each update
trainer     engines hold no request's keys and values and have given back weights and cache: it may train
update      engines have memory for weights again, and none for the cache: only all weights may come now
committed   engines have new weights and their cache: they may go on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_asyncrl.data.errors import UserError

Turn = Literal["engines", "trainer", "update", "committed"]
Move = Literal["rest", "weights", "cache", "go_on"]
NEXT: dict[tuple[Turn, Move], Turn] = {
    ("engines", "rest"): "trainer",
    ("trainer", "weights"): "update",
    ("update", "cache"): "committed",
    ("committed", "go_on"): "engines",
    # Another attempt, for other engines: those of the first are awake already.
    ("update", "weights"): "update",
    # The first update, and that of a resume: engines come with all of their memory.
    ("engines", "weights"): "update",
}
MEANING: dict[Move, str] = {
    "rest": "send the engines to sleep",
    "weights": "give the engines memory for weights",
    "cache": "give the engines memory for their cache",
    "go_on": "let the engines generate",
}


@dataclass
class Turns:
    """Kept by the trainer's first rank. Raises UserError at a move that is not in its order."""

    turn: Turn = "engines"

    def go(self, move: Move) -> None:
        """Make a move."""
        after = NEXT.get((self.turn, move))
        if after is None:
            raise UserError(f"colocated: cannot {MEANING[move]} now: it is the turn of {SAYS[self.turn]}")
        self.turn = after


SAYS: dict[Turn, str] = {
    "engines": "the engines, which generate",
    "trainer": "the trainer",
    "update": "the weight update",
    "committed": "the engines, which have just got their weights",
}
