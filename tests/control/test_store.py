"""control.json: leases go on rising after the process that gives them starts again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moe_asyncrl.control.state import ControlState, acquire, begin, commit, set_phase
from moe_asyncrl.control.store import ControlRecord, ControlStore, close_record
from moe_asyncrl.data.errors import UserError


def test_a_new_process_gives_a_higher_lease_also_to_the_same_holder(tmp_path: Path) -> None:
    store = ControlStore(tmp_path / "control.json")
    assert store.load() == ControlState()
    s = set_phase(commit(begin(acquire(acquire(store.load(), "a"), "b"), 3), 3, [], []), "failed", "boom")
    store.save(s)
    again = ControlStore(tmp_path / "control.json").load()
    assert again == ControlState(epoch=2)
    assert acquire(again, "b").epoch == 3


def test_a_copy_of_the_run_with_an_older_lease_cannot_write(tmp_path: Path) -> None:
    """A cluster can start a job twice: both copies see one file, and the first one's lease is over."""
    first, second = ControlStore(tmp_path / "control.json"), ControlStore(tmp_path / "control.json")
    first.save(acquire(first.load(), "node1"))
    newer = acquire(second.load(), "node2")
    second.save(newer)
    with pytest.raises(UserError, match="another copy of this run has taken lease 2; this one had 1 and ends"):
        first.save(ControlState(epoch=1, holder="node1", begun=True, step=7))
    assert second.load().epoch == 2
    second.save(begin(newer, 3))


def test_a_file_that_cannot_be_read_stops_the_buffer(tmp_path: Path) -> None:
    """Starting from lease 0 would let an old trainer in."""
    path = tmp_path / "control.json"
    for content in (b"", b"{", b'{"epoch": "x"}', b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"control\.json: cannot be read"):
            ControlStore(path).load()


def test_a_file_of_another_build_is_refused(tmp_path: Path) -> None:
    store = ControlStore(tmp_path / "control.json")
    store.save(ControlState(epoch=4))
    path = tmp_path / "control.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(UserError, match="schema 2"):
        store.load()


def test_only_what_is_kept_is_written(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    store = ControlStore(path)
    store.save(ControlState(epoch=1))
    path.unlink()
    store.save(ControlState(epoch=1, begun=True))
    assert not path.exists(), "heartbeats and the like do not cost a write"
    store.save(ControlState(epoch=1, step=1))
    assert path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["control.json"]


def test_the_end_of_a_run_is_written_for_a_process_that_cannot(tmp_path: Path) -> None:
    """The lease stays, so that a resume goes on counting; what cannot be read is left for its owner to complain of."""
    path = tmp_path / "control.json"
    close_record(path, "failed", "boom")
    assert not path.exists()
    ControlStore(path).save(ControlState(epoch=3, holder="a", phase="running", step=7))
    close_record(path, "failed", "boom")
    record = msgspec.json.decode(path.read_bytes(), type=ControlRecord)
    assert (record.phase, record.error, record.epoch, record.step) == ("failed", "boom", 3, 7)
    assert ControlStore(path).load() == ControlState(epoch=3)
    path.write_bytes(b"{")
    close_record(path, "finished", None)
    assert path.read_bytes() == b"{"
