"""Links cut to any part of either side are the blocks of the parameter map, element by element."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.checkpoint.convert.links import Link, flat_run, links_of, row_slabs
from moe_asyncrl.models.algebra import Copy, HfTensor, InterleaveGroups, Op, Stack, View
from moe_asyncrl.models.parameter_map import Entry, Place

STACK3 = HfTensor("s", (3, 4, 6))
OPS: list[Op] = [
    Copy(HfTensor("a", (7, 3))),
    Copy(HfTensor("v", (9,))),
    Stack((HfTensor("g", (4, 3)), HfTensor("u", (4, 3)))),
    InterleaveGroups((HfTensor("q", (8, 2)), HfTensor("k", (4, 2)), HfTensor("v", (4, 2))), 2),
    Stack(tuple(View(tensor=STACK3, index=1, transposed=True, first=first, step=2) for first in (0, 1))),
    Copy(View(tensor=STACK3, index=2, transposed=True)),
    Stack(tuple(View(tensor=HfTensor("b", (3, 6)), index=0, first=first, step=2) for first in (0, 1))),
]


def elements(link: Link) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(tensor, index in it, index in the parameter) of each element."""
    found = set()
    for steps in itertools.product(*(range(len(r)) for r in link.own)):
        own = tuple(r[i] for r, i in zip(link.own, steps, strict=True))
        hf = tuple(r[0] if axis is None else r[steps[axis]] for r, axis in zip(link.hf_ranges, link.axes, strict=True))
        found.add((link.hf.name, hf, own))
    return found


def entry(op: Op) -> Entry:
    return Entry(name="x", op=op, place=Place.FIRST)


@pytest.mark.parametrize("op", OPS, ids=range(len(OPS)))
@given(data=st.data())
def test_a_cut_keeps_exactly_what_lies_inside(op: Op, data: st.DataObject) -> None:
    for link in links_of(entry(op)):
        everything = elements(link)
        assert len(everything) == link.numel
        axis = data.draw(st.integers(0, len(link.own) - 1))
        start, stop = sorted((data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))))
        cut = link.within_own(axis, start, stop)
        assert (elements(cut) if cut else set()) == {e for e in everything if start <= e[2][axis] < stop}
        axis = data.draw(st.integers(0, len(link.hf_ranges) - 1))
        cut = link.within_hf(axis, start, stop)
        assert (elements(cut) if cut else set()) == {e for e in everything if start <= e[1][axis] < stop}


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_flat_run_is_one(shape: list[int], data: st.DataObject) -> None:
    ranges = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        ranges.append(range(start, data.draw(st.integers(start + 1, size)), data.draw(st.integers(1, 2))))
    flat = []
    for index in itertools.product(*ranges):
        at = 0
        for i, size in zip(index, shape, strict=True):
            at = at * size + i
        flat.append(at)
    first = flat_run(shape, ranges)
    if flat == list(range(flat[0], flat[0] + len(flat))):
        assert first == flat[0]
    else:
        assert first is None


@given(rows=st.integers(1, 40), columns=st.integers(1, 9), limit=st.integers(1, 200), bound=st.integers(1, 39))
def test_slabs_cover_all_rows_once_within_the_limit(rows: int, columns: int, limit: int, bound: int) -> None:
    bounds = [bound] if bound < rows else []
    slabs = list(row_slabs((rows, columns), 4, limit, bounds))
    assert [r for start, stop in slabs for r in range(start, stop)] == list(range(rows))
    assert all(stop - start == 1 or (stop - start) * columns * 4 <= limit for start, stop in slabs)
    assert all(not start < edge < stop for start, stop in slabs for edge in bounds)
