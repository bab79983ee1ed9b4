"""The routing log over turns, retractions and resubmissions: every row is the one that was recorded first."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_asyncrl.data.trajectory import RoutingRun
from moe_asyncrl.replay.encoding import HEAD, MISSING, RUN, NotRows, decode_rows, encode_rows, expand, runs_of
from moe_asyncrl.replay.log import Reading, RoutingLog

L, K = 2, 2


def row(token: int, place: int, version: int) -> np.ndarray:
    """What weights `version` route for a token at a place: different wherever one of the three differs."""
    return np.random.default_rng([token, place, version]).integers(0, 250, (L, K)).astype(np.uint8)


def reading(tokens: list[int], start: int, version: int, *, lacking: int = 0) -> Reading:
    n = max(0, len(tokens) - 1 - start - lacking)
    experts = (
        np.stack([row(tokens[i], i, version) for i in range(start, start + n)]) if n else np.zeros((0, L, K), "u1")
    )
    runs = (RoutingRun(start=start, end=start + n, version=version, source="sampled"),) if n else ()
    return Reading(np.array(tokens, dtype=np.int32), start, experts.astype(np.uint8), runs)


turn = st.tuples(
    st.integers(0, 30),  # tokens of the earlier sequence that are kept: fewer than all is a changed prefix
    st.lists(st.integers(0, 3), min_size=1, max_size=6),  # what follows
    st.integers(0, 3),  # rows at the end that the engine does not have
    st.booleans(),  # ask for everything again, or only for what is not there
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(turn, min_size=1, max_size=6))
def test_each_row_is_the_first_one_recorded_for_its_prefix(first: list[int], turns: list[tuple]) -> None:
    """Fault 33: by the shared prefix of tokens. Fault 25: a second reading by other weights replaces nothing."""
    tokens = [*first, 0]
    log = RoutingLog.of(reading(tokens, 0, 0))
    expected: list[int | None] = [0] * (len(tokens) - 1)  # the version that each row was recorded under
    for version, (kept, added, lacking, everything) in enumerate(turns, 1):
        before = tokens
        tokens = [*tokens[: max(1, kept)], *added]
        shared = next((i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), None)
        shared = min(len(before), len(tokens)) if shared is None else shared
        start = 0 if everything else log.rows_from(tokens[:-1])
        log = log.extended(reading(tokens, start, version, lacking=lacking))
        held = expected[:shared]
        held += [None] * (len(tokens) - 1 - len(held))
        for i in range(start, len(tokens) - 1 - lacking):
            held[i] = version if held[i] is None else held[i]
        expected = held[: len(tokens) - 1]
        assert log.tokens.tolist() == tokens and len(log.experts) == len(tokens) - 1
        for i, of in enumerate(expected):
            if of is None:
                assert log.source[i] == MISSING and log.version[i] == -1
                assert (log.experts[i] == 255).all(), "fault 34: what is missing is not expert 0"
            else:
                assert log.version[i] == of
                assert (log.experts[i] == row(tokens[i], i, of)).all()
        runs = log.runs
        np.testing.assert_array_equal(expand(runs)[0], log.version)
        assert [r.start for r in runs] == [0, *(r.end for r in runs[:-1])]


def test_cut_by_the_previous_row_count_would_be_another_row() -> None:
    """Fault 33, planted: the prompt of the second turn is not the first turn's whole text (a template rewrote it)."""
    log = RoutingLog.of(reading([1, 2, 3, 4, 5, 6], 0, 0))
    second = [1, 2, 9, 4, 5, 6, 7, 8]
    assert log.shared(second) == 2 and log.rows_from(second) == 2
    right = log.extended(reading(second, log.rows_from(second), 1))
    by_count = np.concatenate([log.experts, reading(second, 5, 1).experts])
    assert len(by_count) == len(right.experts), "all shapes are right"
    wrong = [i for i in range(7) if (by_count[i] != right.experts[i]).any()]
    assert wrong == [2, 3, 4]
    assert right.version.tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_what_does_not_fit_is_refused() -> None:
    log = RoutingLog.of(reading([1, 2, 3], 0, 0))
    good = reading([1, 2, 3, 4], 2, 1)
    for bad in (
        dataclasses.replace(good, start=3),
        dataclasses.replace(good, start=-1),
        dataclasses.replace(good, experts=good.experts[:, :1]),
        dataclasses.replace(good, runs=()),
        dataclasses.replace(good, runs=(RoutingRun(start=1, end=3, version=1, source="sampled"),)),
    ):
        with pytest.raises(ValueError, match="routing rows"):
            log.extended(bad)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 9), layers=st.integers(1, 5), k=st.integers(1, 4), top=st.sampled_from([3, 255, 256, 65535]),
    start=st.integers(0, 7), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_survive_their_encoding(rows: int, layers: int, k: int, top: int, start: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    experts = draw.integers(0, top, (rows, layers, k), endpoint=True)
    version, source = draw.integers(-1, 3, rows).astype(np.int32), draw.integers(0, 4, rows).astype(np.int8)
    own = np.sort(draw.choice(9, layers, replace=False)).astype(np.uint16)
    data = encode_rows(start, own, experts, version, source)
    back = decode_rows(data, rows=rows, layers=9, k=k)
    assert (back.start, back.runs) == (start, runs_of(version, source, start=start))
    np.testing.assert_array_equal(back.experts, experts)
    assert back.experts.dtype.itemsize == (1 if experts.size == 0 or experts.max() < 256 else 2)
    np.testing.assert_array_equal(back.layers, own)
    for cut in range(len(data)):
        with pytest.raises(NotRows):
            decode_rows(data[:cut], rows=rows, layers=9, k=k) if cut >= 4 else decode_rows(
                b"x" * 3, rows=9, layers=9, k=1
            )
    with pytest.raises(NotRows):
        decode_rows(data, rows=rows + 1, layers=9, k=k)


@pytest.mark.parametrize("ends", [[1, 3], [3, 2], [2, 2], [0, 4], [2, 4]])
@pytest.mark.parametrize("source", [0, 7])
def test_runs_that_rows_cannot_have_are_refused(ends: list[int], source: int) -> None:
    """Of four rows: runs that do not end with them, fall, are empty, or come from nowhere."""
    version, kind = np.array([5, 5, 6, 6], np.int32), np.zeros(4, np.int8)
    data = bytearray(encode_rows(0, np.arange(1, dtype=np.uint16), np.zeros((4, 1, 2), np.int32), version, kind))
    at = HEAD.size + 4 + 2
    runs = np.frombuffer(data, dtype=RUN, count=2, offset=at).copy()
    assert runs["end"].tolist() == [2, 4]
    runs["end"], runs["source"][1] = ends, source
    data[at : at + runs.nbytes] = runs.tobytes()
    if (ends, source) == ([2, 4], 0):
        assert decode_rows(bytes(data), rows=4, layers=1, k=2).runs is not None
        return
    with pytest.raises(NotRows, match="says where 4 rows come from"):
        decode_rows(bytes(data), rows=4, layers=1, k=2)


def test_sglangs_own_encoding_is_read_as_well() -> None:
    ids = np.arange(24).reshape(3, 4, 2)
    found = decode_rows(ids.astype("<i4").tobytes(), rows=3, layers=4, k=2)
    assert found.layers is None and found.runs is None
    np.testing.assert_array_equal(found.experts, ids)
    with pytest.raises(ValueError, match="from -1"):
        encode_rows(0, np.arange(4, dtype=np.uint16), ids - 1, np.zeros(3, np.int32), np.zeros(3, np.int8))
