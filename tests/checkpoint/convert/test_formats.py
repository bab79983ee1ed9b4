"""What is written without torch is what torch reads, and the other way round; nothing that a pickle names is run."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_asyncrl.checkpoint.convert import pickled
from moe_asyncrl.checkpoint.convert.casts import cast, values
from moe_asyncrl.checkpoint.convert.difference import compare
from moe_asyncrl.checkpoint.convert.distcp import METADATA, Chunk, DistcpDir, GlobalTensor, Slot, metadata_bytes
from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.torch_zip import ALIGNMENT, frame, framed_at, locate, saved_object
from moe_asyncrl.data.errors import UserError

TYPES = ("float32", "bfloat16", "float16", "int64", "uint8")
SHAPES: list[tuple[int, ...]] = [(), (3,), (1, 5, 7), (2, 128, 300)]


def raw(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_loads_a_framed_tensor_and_its_own_are_found(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = (100 * torch.randn(shape)).to(getattr(torch, dtype))
    around = frame(dtype, shape)
    ours = around.head + raw(tensor) + around.tail
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert (loaded.dtype, loaded.shape, raw(loaded)) == (tensor.dtype, tensor.shape, raw(tensor))
    assert len(around.head) % ALIGNMENT == 0
    for data in (ours, saved(tensor)):
        found = located(tmp_path / "file", data, before=b"some bytes in front")
        assert found == (shape, dtype, raw(tensor))


def located(path: Path, data: bytes, before: bytes = b"") -> tuple[tuple[int, ...], str, bytes]:
    """Shape, type and bytes of the tensor in a file that begins with `before`."""
    path.write_bytes(before + data + b"and behind")
    handle = os.open(path, os.O_RDONLY)
    try:
        found = locate(handle, len(before), len(data), "here")
        size = math.prod(found.shape) * ITEM_SIZES[found.dtype]
        return found.shape, found.dtype, os.pread(handle, size, found.offset)
    finally:
        os.close(handle)


def test_views_are_found_inside_their_storage_and_other_orders_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(40.0).view(8, 5)
    assert located(tmp_path / "a", saved(whole[2:4])) == ((2, 5), "float32", raw(whole[2:4]))
    with pytest.raises(UserError, match=r"here: the tensor is not stored in C order \(strides \[1, 5\]\)"):
        located(tmp_path / "b", saved(whole.T))
    with pytest.raises(UserError, match="here: cannot be read as a tensor of torch"):
        located(tmp_path / "c", saved({"a": 1}))


@given(cut=st.integers(0, 900), flip=st.integers(0, 255))
def test_a_damaged_file_is_an_error_or_the_same_place(cut: int, flip: int) -> None:
    data = bytearray(saved(torch.arange(6.0)))
    at = cut * len(data) // 900 if cut < 900 else len(data) - 1
    data[at] ^= flip
    handle = os.memfd_create("damaged")
    try:
        os.write(handle, data)
        found = locate(handle, 0, len(data), "here")
        assert math.prod(found.shape) * 4 + found.offset <= len(data)
    except UserError:
        pass
    finally:
        os.close(handle)


def test_torch_loads_small_objects() -> None:
    value = {"a": 1, "b": (2.5, "x", [None, -70000, 1 << 40, True]), "c": {}}
    assert torch.load(io.BytesIO(saved_object(value)), weights_only=True) == value


class Trap:
    """An object whose pickle runs a command when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_pickle_names_is_run(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save([Trap(tmp_path / "made")], out, _use_new_zipfile_serialization=False)
    import pickletools

    data = out.getvalue()
    assert b"mkdir" in data
    # The file of the old format is several pickles; the object is in the last but one that names it.
    for start in [i for i in range(len(data)) if data.startswith(b"\x80\x02", i)]:
        with_trap = data[start:]
        assert list(pickletools.genops(with_trap))
        found = pickled.load(with_trap)
        if isinstance(found, list) and found:
            assert found[0].function.name == "mkdir" and found[0].arguments == (str(tmp_path / "made"),)
            break
    else:
        pytest.fail("the trap was not in the file")
    assert not (tmp_path / "made").exists()


def test_metadata_are_what_torch_writes_and_reads(tmp_path: Path) -> None:
    """The same objects as torch's own classes, in both directions."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = (Chunk((0, 0), (2, 3), Slot("a", 0, 10)), Chunk((2, 0), (1, 3), Slot("b", 64, 10)))
    ours = [GlobalTensor("k", (3, 3), "bfloat16", chunks), GlobalTensor("n", (300,), "float32", ())]
    (tmp_path / METADATA).write_bytes(metadata_bytes(ours, {"o/shard_0_1": Slot("a", 0, 10)}))
    read = FileSystemReader(tmp_path).read_metadata()
    sizes = torch.Size
    theirs = Metadata(
        {
            "k": TensorStorageMetadata(
                TensorProperties(torch.bfloat16),
                sizes((3, 3)),
                [
                    ChunkStorageMetadata(sizes((0, 0)), sizes((2, 3))),
                    ChunkStorageMetadata(sizes((2, 0)), sizes((1, 3))),
                ],
            ),
            "n": TensorStorageMetadata(TensorProperties(torch.float32), sizes((300,)), []),
            "o/shard_0_1": BytesStorageMetadata(),
        },
        planner_data={},
        storage_data={
            MetadataIndex("k", sizes((0, 0))): _StorageInfo("a", 0, 10),
            MetadataIndex("k", sizes((2, 0))): _StorageInfo("b", 64, 10),
            MetadataIndex("o/shard_0_1"): _StorageInfo("a", 0, 10),
        },
        storage_meta=read.storage_meta,
    )
    assert read == theirs
    for folder, content in (
        (tmp_path / "ours", (tmp_path / METADATA).read_bytes()),
        (tmp_path / "theirs", dumped(theirs)),
    ):
        folder.mkdir()
        (folder / METADATA).write_bytes(content)
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (folder / "common.pt").write_bytes(saved_object({}))
        (folder / "a").write_bytes(bytes(10))
        (folder / "b").write_bytes(bytes(74))
        opened = DistcpDir.open(folder)
        assert list(opened.tensors.values()) == ours
        assert opened.objects == {"o/shard_0_1": Slot("a", 0, 10)}


def dumped(value: Any) -> bytes:
    """As torch's writer does it."""
    from torch.distributed.checkpoint import filesystem

    return bytes(filesystem.pickle.dumps(value))


BITS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("of", ["bfloat16", "float16"])
@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16"])
def test_every_16_bit_number_is_cast_as_torch_casts(of: str, to: str) -> None:
    check_cast(BITS, of, to)


@pytest.mark.parametrize("to", ["bfloat16", "float16"])
def test_float32_is_rounded_as_torch_rounds(to: str) -> None:
    """Every upper half with the lower halves at which rounding turns."""
    halves = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001], np.uint32)
    check_cast(((BITS.astype(np.uint32) << 16)[:, None] | halves).ravel(), "float32", to)


def check_cast(bits: np.ndarray[Any, Any], of: str, to: str) -> None:
    found = cast(bits, of, to)
    tensor = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(getattr(torch, of))
    expected = tensor.to(getattr(torch, to))
    width = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    expected_bits = expected.view(width).numpy().view(found.dtype)
    nan = torch.isnan(tensor).numpy()
    assert np.array_equal(found[~nan], expected_bits[~nan])
    assert np.isnan(values(found, to)[nan]).all()


def test_differences_count_bits_and_measure_values() -> None:
    a = np.array([1.0, -0.0, np.nan, np.inf, 3.0], np.float32).view(np.uint32)
    assert compare(0, a, a.copy(), "float32", "float32").differing == 0
    b = np.array([1.5, 0.0, np.nan, np.inf, 3.0], np.float32).view(np.uint32)
    found = compare(7, a, b, "float32", "float32")
    assert (found.tensor, found.elements, found.differing, found.largest) == (7, 5, 2, 0.5)
    c = np.array([1.0, 0.0, np.nan, np.inf, np.nan], np.float32).view(np.uint32)
    assert math.isnan(compare(0, a, c, "float32", "float32").largest)
    half = cast(np.array([1.0, 2.0], np.float32).view(np.uint32), "float32", "bfloat16")
    other = compare(0, half, np.array([1.0, 2.25], np.float32).view(np.uint32), "bfloat16", "float32")
    assert (other.differing, other.largest) == (1, 0.25)


def test_a_frame_is_known_by_all_of_its_bytes(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).bfloat16()
    around = frame("bfloat16", (5, 7))
    data = b"front" + around.head + raw(tensor) + around.tail

    def found(content: bytes, length: int, dtype: str = "bfloat16", shape: tuple[int, ...] = (5, 7)) -> int | None:
        (tmp_path / "f").write_bytes(content)
        handle = os.open(tmp_path / "f", os.O_RDONLY)
        try:
            return framed_at(handle, 5, length, dtype, shape)
        finally:
            os.close(handle)

    length = len(data) - 5
    assert found(data, length) == 5 + len(around.head)
    assert found(data, length - 1) is None
    assert found(data, length, shape=(7, 5)) is None
    assert found(data, length, dtype="float16") is None
    for at in (5, 5 + len(around.head) - 1, len(data) - len(around.tail), len(data) - 1):
        assert found(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], length) is None, at
    theirs = b"front" + saved(tensor)
    assert found(theirs, len(theirs) - 5) is None
