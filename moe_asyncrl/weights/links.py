"""How long an update takes at least, for the links that machines have.

    seconds = 8 x (bytes of the busiest rank) / (bits a second of its link)

Every rank has a link of its own that sends and receives at once, so the busiest is the one that sends or receives
most; a broadcast passes through each receiver once, whatever their number (a ring or a tree of chunks). Start-up,
protocol, switches that are shared and the loading itself come on top: it is a lower bound, to compare plans by.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A link of one rank, by what its standard says for each direction."""

    name: str
    gbit_per_s: float

    def seconds(self, nbytes: int) -> float:
        """Time of so many bytes in one direction."""
        return 8 * nbytes / (self.gbit_per_s * 1e9)


LINKS = (
    Link("25 Gb/s Ethernet", 25),
    Link("100 Gb/s Ethernet", 100),
    Link("400 Gb/s InfiniBand (NDR)", 400),
    Link("NVLink 4 (450 GB/s)", 3600),
)
