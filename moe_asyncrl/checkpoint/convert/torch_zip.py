"""The files of `torch.save`, one tensor or small object each, written and located without torch.

They are zip files without compression: records `data.pkl` (how to build the object), `data/0` (a tensor's bytes, at a
multiple of 64) and a few short ones. torch.load checks no CRC, so none of a tensor's bytes is computed here
(`torch.serialization.set_crc32_options(False)` does the same). Source: `torch/serialization.py`,
`caffe2/serialize/inline_container.cc`; zip: APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.pickled import Built, Global, Persistent, dump, load
from moe_asyncrl.data.errors import UserError

ALIGNMENT = 64
_STORAGES = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage",
    "float64": "DoubleStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "uint8": "ByteStorage",
}
_TYPES = {storage: dtype for dtype, storage in _STORAGES.items()}
_SHORT_RECORDS = (
    (".format_version", b"1"),
    (".storage_alignment", b"64"),
    ("byteorder", b"little"),
    ("version", b"3\n"),
)
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
LOOKED_INTO = 4096
"""Bytes at either end of a file in which everything but the tensor's bytes is, in files of torch and of this module."""
_LONGEST_TAIL = 1 << 16
_ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before and behind a tensor's bytes."""

    head: bytes
    tail: bytes


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor inside a file of `torch.save`."""

    offset: int
    """Byte of the surrounding file at which its first element is."""
    shape: tuple[int, ...]
    dtype: str


@lru_cache(maxsize=256)
def frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor; its bytes come between. Raises ValueError for 4 GiB or more."""
    numel = math.prod(shape)
    size = numel * ITEM_SIZES[dtype]
    if size >= _ZIP64:
        raise ValueError(f"{size} bytes do not fit into one record")
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = ("storage", Global("torch", _STORAGES[dtype]), "0", "cpu", numel)
    hooks = Built(Global("collections", "OrderedDict"), ())
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    pickled = dump(Built(rebuild, (Persistent(storage), 0, shape, strides, False, hooks)))
    return _archive(pickled, size)


def saved_object(value: Any) -> bytes:
    """What `torch.save` makes of an object of None, numbers, strings, tuples, lists and dicts."""
    found = _archive(dump(value), None)
    return found.head + found.tail


def framed_at(file: int, start: int, length: int, dtype: str, shape: tuple[int, ...]) -> int | None:
    """Where the bytes of a tensor begin, if what stands around them is the `frame` of its type and shape; else None."""
    size = math.prod(shape) * ITEM_SIZES[dtype]
    if dtype not in _STORAGES or size >= _ZIP64:
        return None
    around = frame(dtype, shape)
    payload = start + len(around.head)
    whole = length == len(around.head) + size + len(around.tail)
    if (
        whole
        and os.pread(file, len(around.head), start) == around.head
        and os.pread(file, len(around.tail), payload + size) == around.tail
    ):
        return payload
    return None


def locate(file: int, start: int, length: int, where: str) -> Located:
    """Find the one tensor of a file of `torch.save` that is `length` bytes of open file `file` from byte `start`.

    Raises:
        UserError: it is damaged, compressed, or not one contiguous tensor. `where` names it.
    """
    try:
        found = _records(file, start, length)
        pickled = next(name for name in found if name.endswith("data.pkl"))
        storage, first, shape, strides = _tensor(_content(file, start, *found[pickled]))
        offset, size = found[pickled.removesuffix("data.pkl") + f"data/{storage[2]}"]
        dtype = _TYPES[storage[1].name]
        payload = _payload(file, start, offset)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, struct.error, OSError) as error:
        raise UserError(f"{where}: cannot be read as a tensor of torch.save: damaged or of another kind") from error
    item = ITEM_SIZES[dtype]
    expected = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if any(a != b for a, b, n in zip(strides, expected, shape, strict=True) if n > 1):
        raise UserError(f"{where}: the tensor is not stored in C order (strides {list(strides)})")
    if (first + math.prod(shape)) * item > size or payload + size > start + length:
        raise UserError(f"{where}: the tensor's bytes are cut short")
    return Located(payload + first * item, shape, dtype)


def _archive(pickled: bytes, size: int | None) -> Frame:
    out = io.BytesIO()
    directory: list[bytes] = []
    for name, content in (("data.pkl", pickled), *_SHORT_RECORDS):
        _record(out, directory, name, content, len(content), zlib.crc32(content))
    if size is not None:
        _record(out, directory, "data/0", b"", size, 0)
    head = out.getvalue()
    end = len(head) + (size or 0)
    central = b"".join(directory)
    count = len(directory)
    return Frame(head, central + struct.pack("<4sHHHHIIH", _END, 0, 0, count, count, len(central), end, 0))


def _record(out: io.BytesIO, directory: list[bytes], name: str, content: bytes, size: int, crc: int) -> None:
    """A local header, padded as torch does it, with its content; and its entry of the directory."""
    at, encoded = out.tell(), f"archive/{name}".encode()
    gap = -(at + 30 + len(encoded) + 4) % ALIGNMENT
    extra = b"FB" + struct.pack("<H", gap) + b"Z" * gap
    fields = struct.pack("<HHHHHIIIH", 0, 0, 0, 0, 0, crc, size, size, len(encoded))
    out.write(_LOCAL + fields + struct.pack("<H", len(extra)) + encoded + extra + content)
    directory.append(_CENTRAL + struct.pack("<H", 0) + fields + struct.pack("<HHHHII", 0, 0, 0, 0, 0, at) + encoded)


def _records(file: int, start: int, length: int) -> dict[str, tuple[int, int]]:
    """By name: where a record's local header is, from `start`, and the size of its content."""
    searched = min(length, LOOKED_INTO)
    tail = os.pread(file, searched, start + length - searched)
    if _END not in tail:
        searched = min(length, _LONGEST_TAIL)
        tail = os.pread(file, searched, start + length - searched)
    end = tail.rindex(_END)
    count, size, offset = struct.unpack_from("<HII", tail, end + 10)
    if _ZIP64 in (size, offset) or count == 0xFFFF:
        locator = end - 20
        (at,) = struct.unpack_from("<Q", tail, locator + 8)
        count, size, offset = struct.unpack_from("<QQQ", os.pread(file, 56, start + at), 32)
    first = offset - (length - searched)
    directory = tail[first : first + size] if first >= 0 else os.pread(file, size, start + offset)
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for _ in range(count):
        if directory[at : at + 4] != _CENTRAL:
            raise ValueError("no zip directory")
        method, packed, plain = (
            *struct.unpack_from("<H", directory, at + 10),
            *struct.unpack_from("<II", directory, at + 20),
        )
        name_size, extra_size, comment_size = struct.unpack_from("<HHH", directory, at + 28)
        (header,) = struct.unpack_from("<I", directory, at + 42)
        name = directory[at + 46 : at + 46 + name_size].decode()
        extra = directory[at + 46 + name_size : at + 46 + name_size + extra_size]
        if method != 0:
            raise ValueError("compressed")
        if _ZIP64 in (packed, plain, header):
            plain, header = _zip64(extra, plain, packed, header)
        found[name] = (header, plain)
        at += 46 + name_size + extra_size + comment_size
    return found


def _zip64(extra: bytes, plain: int, packed: int, header: int) -> tuple[int, int]:
    """Size and header offset of an entry that does not fit into 32 bits, from its extra field 1."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            plain = values.pop(0) if plain == _ZIP64 else plain
            packed = values.pop(0) if packed == _ZIP64 else packed
            header = values.pop(0) if header == _ZIP64 else header
            return plain, header
        at += 4 + size
    raise ValueError("no 64-bit sizes")


def _payload(file: int, start: int, header: int) -> int:
    local = os.pread(file, 30, start + header)
    if local[:4] != _LOCAL:
        raise ValueError("no local header")
    name_size, extra_size = struct.unpack_from("<HH", local, 26)
    return start + header + 30 + int(name_size) + int(extra_size)


def _content(file: int, start: int, header: int, size: int) -> bytes:
    found = os.pread(file, size, _payload(file, start, header))
    if len(found) != size:
        raise ValueError("cut short")
    return found


def _tensor(pickled: bytes) -> tuple[Any, int, tuple[int, ...], tuple[int, ...]]:
    """(storage, first element, shape, strides) of a pickled tensor."""
    value = load(pickled)
    if isinstance(value, Built) and value.function.name == "_rebuild_parameter":
        value = value.arguments[0]
    if not isinstance(value, Built) or value.function.name != "_rebuild_tensor_v2":
        raise ValueError("not a tensor")
    storage, first, shape, strides = value.arguments[:4]
    return storage.key, int(first), tuple(map(int, shape)), tuple(map(int, strides))
