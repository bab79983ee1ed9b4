"""Units that compare the tensors of two checkpoints of any kinds, or tensors within one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from moe_asyncrl.checkpoint.convert.contents import FileTable
from moe_asyncrl.checkpoint.convert.crew import run_units
from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.links import row_slabs
from moe_asyncrl.checkpoint.convert.program import CompareUnit, Finished, Pair
from moe_asyncrl.checkpoint.convert.progress import Progress
from moe_asyncrl.checkpoint.convert.to_hf import Checkpoint

SLAB_BYTES = 16 << 20
UNIT_BYTES = 256 << 20


@dataclass
class Total:
    """How one tensor differs."""

    name: str
    elements: int = 0
    differing: int = 0
    largest: float = 0.0


def compare_tensors(
    a: Checkpoint, b: Checkpoint, names: Sequence[tuple[str, str]], workers: int, what: str | None
) -> list[Total]:
    """The difference of each pair of tensors (a name of `a`, a name of `b`, of one shape), in that order.

    `what` begins the lines of the progress; None: there are none.

    Raises:
        UserError: a checkpoint is damaged, or a worker failed.
    """
    totals = [Total(mine) for mine, _ in names]
    units = list(compare_units(a, b, names))
    progress = Progress(what, sum(unit.moved for unit in units)) if what is not None else None

    def moved(size: int) -> None:
        if progress is not None:
            progress.add(size)

    def finished(answer: Finished) -> None:
        for found in answer.differences:
            total = totals[found.tensor]
            total.elements += found.elements
            total.differing += found.differing
            # NaN wins: max() would lose it.
            total.largest = found.largest if found.largest != found.largest else max(total.largest, found.largest)

    run_units(units, workers, moved=moved, finished=finished)
    if progress is not None:
        progress.finish()
    return totals


def compare_units(a: Checkpoint, b: Checkpoint, names: Iterable[tuple[str, str]]) -> Iterator[CompareUnit]:
    """All of each pair of tensors, in units of bounded size."""
    table, pairs, types, moved, number = FileTable(), list[Pair](), dict[int, tuple[str, str]](), 0, 0
    for tensor, (mine, theirs) in enumerate(names):
        x, y = a.tensors[mine], b.tensors[theirs]
        item = ITEM_SIZES[x.dtype]
        for start, stop in row_slabs(x.shape, max(item, ITEM_SIZES[y.dtype]), SLAB_BYTES):
            size = (stop - start) * prod(x.shape[1:]) * item
            if pairs and moved + size > UNIT_BYTES:
                yield CompareUnit(number, table.names, tuple(pairs), types, moved)
                table, pairs, types, moved, number = FileTable(), [], {}, 0, number + 1
            types[tensor] = (x.dtype, y.dtype)
            pairs.append(Pair(tensor, a.content(mine, start, stop, table), b.content(theirs, start, stop, table)))
            moved += size
    if pairs:
        yield CompareUnit(number, table.names, tuple(pairs), types, moved)
