"""What goes wrong with engines during an update."""

from __future__ import annotations

from collections.abc import Mapping

from moe_asyncrl.data.errors import UserError


class EnginesFailed(UserError):
    """Some engines cannot go on with the update.

    `lost`: the reason of each, by name; empty if nobody is known to be at fault.
    """

    def __init__(self, lost: Mapping[str, str], what: str = "") -> None:
        self.lost = dict(lost)
        listed = "; ".join(
            reason if reason.startswith(name) else f"{name}: {reason}" for name, reason in sorted(self.lost.items())
        )
        super().__init__(listed or what)


def raise_if_any(lost: Mapping[str, str]) -> None:
    """Raise EnginesFailed if `lost` names an engine."""
    if lost:
        raise EnginesFailed(lost)
