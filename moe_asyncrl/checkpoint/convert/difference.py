"""How much two arrays differ, as raw items of known types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_asyncrl.checkpoint.convert.casts import values
from moe_asyncrl.checkpoint.convert.mover import Files, assembled
from moe_asyncrl.checkpoint.convert.program import CompareUnit, Difference
from moe_asyncrl.checkpoint.convert.stores import Stores

if TYPE_CHECKING:
    import numpy as np


def compare_unit(unit: CompareUnit, moved: Callable[[int], None], stores: Stores) -> tuple[Difference, ...]:
    """Compare all pairs of a unit; one difference for each. `moved` is told of bytes as they are done."""
    found = []
    with Files(unit.files, stores) as files:
        for pair in unit.pairs:
            a, b = assembled(pair.a, files), assembled(pair.b, files)
            found.append(compare(pair.tensor, a, b, *unit.types[pair.tensor]))
            moved(a.nbytes)
    return tuple(found)


def compare(tensor: int, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], a_type: str, b_type: str) -> Difference:
    """Bit by bit where the types are the same; else by value. Raises ValueError for different shapes."""
    import numpy as np

    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    if a_type == b_type and np.array_equal(a, b):
        return Difference(tensor, a.size, 0, repr(0.0))
    x, y = values(a, a_type), values(b, b_type)
    if a_type == b_type:
        differing = int(np.count_nonzero(a != b))
    else:
        differing = int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y))))
    both = np.isnan(x) & np.isnan(y)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(both | (x == y), 0.0, np.abs(x.astype(np.float64) - y))
    largest = float(distance.max()) if distance.size else 0.0
    return Difference(tensor, a.size, differing, repr(largest))
