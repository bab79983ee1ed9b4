"""What the buffer keeps of the trained batches, and that it stays bounded."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

from moe_asyncrl.buffer.recorder import WAITING, Recorder
from moe_asyncrl.buffer.service import Held
from moe_asyncrl.data import messages as m
from moe_asyncrl.data.recorded import files_in, newest_first
from tests.buffer.harness import Ask, begun, packed, service
from tests.data.samples import group


def held(index: int, **kwargs: int) -> Held:
    headers, frames = packed(group(index, **kwargs))
    names = [(h.identity.trajectory, s.field) for h in headers for s in h.frames]
    return Held(m.Ticket(index=index, attempt=0, epoch=1), headers, dict(zip(names, frames, strict=True)))


def test_a_trained_batch_is_recorded_once_with_its_version(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, groups_per_step=1, limit_bytes=2**20)
    to = service(trained=recorder)
    owner = begun(to)
    sampler = Ask(to, "rollout-0")
    tickets = sampler(m.AskTickets, wanted=2, holding=()).tickets
    for t in tickets:
        assert sampler.put(t).held
    assert isinstance(owner(m.Take, step=1, version=0, groups=2), m.Batch)
    for _ in range(2):  # the trainer asks again when a reply was lost
        assert isinstance(owner(m.Consumed, step=1), m.ConsumedResult)
    recorder.close()
    (found,) = newest_first(tmp_path)
    assert (found.group.step, found.group.version) == (1, 0)
    want = group(found.group.index)
    for a, b in zip(want, found.trajectories(), strict=True):
        assert a.identity == b.identity and a.rewards == b.rewards
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.routing_experts, b.routing_experts)


def test_groups_are_taken_from_all_of_the_batch(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, groups_per_step=2, limit_bytes=2**20)
    recorder(1, 0, [held(i) for i in range(8)])
    recorder.close()
    assert [r.group.index for r in newest_first(tmp_path)] == [6, 2]


def test_nothing_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t", groups_per_step=0, limit_bytes=2**20)
    recorder(1, 0, [held(1)])
    recorder.close()
    assert not (tmp_path / "t").exists()


def size_of(folder: Path) -> int:
    """Bytes in the files; one that the recorder drops meanwhile has none."""
    total = 0
    for path in files_in(folder):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_the_disk_is_bounded_and_whole_files_go_first(tmp_path: Path) -> None:
    limit = 40_000
    for life in range(2):  # the second one begins a file of its own, and counts what the first one left
        recorder = Recorder(tmp_path, groups_per_step=1, limit_bytes=limit)
        for step in range(1, 41):
            recorder(100 * life + step, step - 1, [held(step, tokens=200)])
            while recorder._waiting.qsize() > WAITING // 2:
                threading.Event().wait(0.005)
            assert size_of(tmp_path) <= limit
        recorder.close()
        assert recorder.dropped == 0
    steps = [r.group.step for r in newest_first(tmp_path)]
    assert steps == list(range(140, 140 - len(steps), -1)) and len(steps) >= 4  # the newest ones, without a gap
    assert int(files_in(tmp_path)[0].stem) > 0


def test_a_disk_that_refuses_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    recorder = Recorder(blocked / "t", groups_per_step=1, limit_bytes=2**20)
    recorder(1, 0, [held(1)])
    recorder.close()
    recorder(2, 1, [held(2)])
    assert "not recorded any more" in caplog.text


def test_a_slow_disk_is_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, groups_per_step=1, limit_bytes=2**20)
    go = threading.Event()
    write = recorder._write
    monkeypatch.setattr(recorder, "_write", lambda *item: (go.wait(30), write(*item)))
    for step in range(1, WAITING + 11):
        recorder(step, step - 1, [held(step)])
    assert recorder.dropped >= 9
    go.set()
    recorder.close()
    assert len(list(newest_first(tmp_path))) == WAITING + 10 - recorder.dropped
