"""The ring of messages in shared memory, and messages as files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from moe_asyncrl.data.errors import DeadlineExceeded
from moe_asyncrl.data.weights import Base, Stream
from moe_asyncrl.weights.message_files import (
    INDEX,
    FolderError,
    FolderWriter,
    Index,
    folder_name,
    message_name,
    newest,
    prune,
    read_index,
    read_message,
)
from moe_asyncrl.weights.ring import RingError, RingReader, RingWriter, ring_bytes


def message(number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).mul(number + 1).to(torch.uint8)


def test_every_reader_gets_every_message_in_order(tmp_path: Path) -> None:
    path, sizes = tmp_path / "ring", [1 + (i * 37) % 5000 for i in range(200)]
    writer = RingWriter(path, slots=3, slot_bytes=5000, readers=2)
    assert path.stat().st_size == ring_bytes(3, 5000, 2) and path.stat().st_mode & 0o077 == 0
    wrong: list[int] = []

    def read(which: int) -> None:
        reader = RingReader(path, which)
        opened.wait()
        for number, size in enumerate(sizes):
            if not torch.equal(reader.take(size, wait_s=10), message(number, size)):
                wrong.append(number)
            reader.release()
        reader.close()

    opened = threading.Barrier(3)
    threads = [threading.Thread(target=read, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    opened.wait()
    for number, size in enumerate(sizes):
        writer.slot(size, wait_s=10).copy_(message(number, size))
        writer.publish(size)
    for thread in threads:
        thread.join()
    writer.close()
    assert not wrong and not path.exists()


def test_a_slot_stays_until_every_reader_lets_go(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", slots=2, slot_bytes=8, readers=2)
    fast, slow = RingReader(writer.path, 0), RingReader(writer.path, 1)
    for number in range(2):
        writer.slot(8, wait_s=1).copy_(message(number, 8))
        writer.publish(8)
        assert torch.equal(fast.take(8, wait_s=1), message(number, 8))
        fast.release()
    held = slow.take(8, wait_s=1)
    with pytest.raises(DeadlineExceeded, match=r"readers \[1\]"):
        writer.slot(8, wait_s=0.05)
    assert torch.equal(held, message(0, 8))
    with pytest.raises(RingError, match="called off"):
        writer.slot(8, wait_s=5, stop=lambda: True)
    slow.release()
    writer.slot(8, wait_s=1)
    slow.close()
    with pytest.raises(RingError, match=r"readers \[1\] .* have left"):
        writer.slot(8, wait_s=1)
    again = RingReader(writer.path, 1)
    writer.slot(8, wait_s=1).copy_(message(2, 8))
    writer.publish(8)
    assert torch.equal(again.take(8, wait_s=1), message(2, 8))


def test_what_readers_are_told(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "ring", slots=2, slot_bytes=8, readers=1)
    reader = RingReader(writer.path, 0)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s"):
        reader.take(8, wait_s=0.05)
    writer.slot(4, wait_s=1)
    writer.publish(4)
    with pytest.raises(RingError, match="has 4 bytes, 8 were announced"):
        reader.take(8, wait_s=1)
    with pytest.raises(RingError, match="no reader 1"):
        RingReader(writer.path, 1)
    with pytest.raises(ValueError, match="does not fit"):
        writer.slot(9, wait_s=1)
    with pytest.raises(RingError, match="File exists"):
        RingWriter(writer.path, slots=2, slot_bytes=8, readers=1)
    writer.close()
    assert len(reader.take(4, wait_s=1)) == 4
    reader.release()
    with pytest.raises(RingError, match="closed"):
        reader.take(4, wait_s=1)
    (tmp_path / "other").write_bytes(bytes(8192))
    with pytest.raises(RingError, match="is no ring"):
        RingReader(tmp_path / "other", 0)
    with pytest.raises(RingError, match="No such file"):
        RingReader(tmp_path / "none", 0)


def test_a_closed_ring_leaves_no_memory_mapped(tmp_path: Path) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    writer = RingWriter(tmp_path / "ring", slots=2, slot_bytes=8, readers=1)
    reader = RingReader(writer.path, 0)
    assert maps() == 2
    writer.close()
    del writer, reader
    assert maps() == 0 and not list(tmp_path.iterdir())


def index(version: int, base: Base | None = None) -> Index:
    streams = (Stream(number=0, sender=0, channel=""),)
    return Index(epoch=1, version=version, base=base, manifest=f"m{version}", streams=streams, schedules=(((0, 9),),))


def test_files_appear_whole(tmp_path: Path) -> None:
    folder = tmp_path / folder_name(7, "u")
    writer = FolderWriter(folder)
    writer.put(3, 17, message(1, 999))
    assert [p.name for p in folder.iterdir()] == ["s0003-000017.message"] == [message_name(3, 17)]
    into = torch.zeros(999, dtype=torch.uint8)
    read_message(folder, 3, 17, into, wait_s=1)
    assert torch.equal(into, message(1, 999))
    with pytest.raises(FolderError, match="999 bytes, 5 were announced"):
        read_message(folder, 3, 17, into[:5], wait_s=1)
    with pytest.raises(DeadlineExceeded, match=r"s0003-000018\.message"):
        read_message(folder, 3, 18, into, wait_s=0.05)
    later = threading.Timer(0.1, lambda: writer.put(3, 18, message(2, 999)))
    later.start()
    read_message(folder, 3, 18, into, wait_s=10)
    later.join()
    assert torch.equal(into, message(2, 999))
    with pytest.raises(FolderError, match="not complete"):
        read_index(folder)
    writer.complete(index(7))
    assert read_index(folder) == index(7)


def test_the_newest_whole_update_is_found_and_older_ones_go(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert newest(root) is None
    made = {}
    for version, base, complete in (
        (2, None, True),
        (10, None, True),
        (11, Base(version=10, manifest="m"), True),
        (12, None, False),
    ):
        writer = FolderWriter(root / folder_name(version, f"u{version}"))
        writer.put(0, 0, message(version, 9))
        if complete:
            writer.complete(index(version, base))
        made[version] = writer.folder
    (root / "something else").mkdir()
    assert newest(root) == made[10] and newest(root, 2) == made[2] and newest(root, 11) is None
    (made[10] / INDEX).write_text("{")
    assert newest(root) == made[2]
    FolderWriter(made[10]).complete(index(10))
    prune(root, made[10])
    assert sorted(os.listdir(root)) == sorted([made[10].name, made[11].name, made[12].name, "something else"])
