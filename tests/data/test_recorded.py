"""Recorded groups: what was written reads back whole, and a torn or damaged end is passed over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.data.recorded import HEAD, Recorded, RecordedGroup, encode_record, newest_first, records_of
from moe_asyncrl.data.trajectory import Trajectory
from moe_asyncrl.data.validate import ContractViolation
from moe_asyncrl.data.wire import arrays_of, encode
from tests.data.samples import group, trajectories


def record(step: int, found: list[Trajectory]) -> bytes:
    parts = [encode(t) for t in found]
    header = RecordedGroup(
        step=step, version=step - 1, index=10 * step, attempt=0, time=float(step), headers=tuple(h for h, _ in parts)
    )
    return b"".join(bytes(p) for p in encode_record(header, [f for _, frames in parts for f in frames]))


def write(folder: Path, number: int, data: bytes) -> Path:
    path = folder / f"{number:08d}.groups"
    path.write_bytes(data)
    return path


@given(st.lists(trajectories(), min_size=1, max_size=3, unique_by=lambda t: t.identity.trajectory))
def test_every_field_reads_back(tmp_path_factory: pytest.TempPathFactory, found: list[Trajectory]) -> None:
    path = write(tmp_path_factory.mktemp("t"), 0, record(1, found))
    (one,) = records_of(path)
    back = one.trajectories()
    for a, b in zip(found, back, strict=True):
        assert (a.identity, a.rewards, a.segments, a.routing_runs, a.metadata) == (
            b.identity,
            b.rewards,
            b.segments,
            b.routing_runs,
            b.metadata,
        )
        assert arrays_of(a).keys() == arrays_of(b).keys()
        for name, array in arrays_of(a).items():
            np.testing.assert_array_equal(array, arrays_of(b)[name])


@pytest.mark.parametrize("lost", [17])
def test_a_torn_last_record_is_passed_over_wherever_it_is_cut(tmp_path: Path, lost: int) -> None:
    whole, last = record(1, group(1)), record(2, group(2))
    for cut in range(0, len(last), lost):
        path = write(tmp_path, 0, whole + last[:cut])
        assert [r.group.step for r in records_of(path)] == [1], cut


def test_newest_first_over_files_and_past_a_torn_one(tmp_path: Path) -> None:
    write(tmp_path, 0, record(1, group(1)) + record(2, group(2)) + record(3, group(3))[:-1])
    write(tmp_path, 1, record(3, group(3)) + record(4, group(4)))
    (tmp_path / "notes.txt").write_text("not ours")
    assert [r.group.step for r in newest_first(tmp_path)] == [4, 3, 2, 1]


def test_damage_is_noticed(tmp_path: Path) -> None:
    data = record(1, group(1))
    planted = bytearray(data)
    planted[-1] ^= 1  # in the frames
    (found,) = records_of(write(tmp_path, 0, bytes(planted)))
    with pytest.raises(ContractViolation, match="damaged"):
        found.trajectories()
    planted = bytearray(data)
    planted[HEAD.size + 5] ^= 1  # in the header
    none: list[Recorded] = list(records_of(write(tmp_path, 1, bytes(planted))))
    assert none == []
