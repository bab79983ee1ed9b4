"""The directory of a Megatron-Core distributed checkpoint (`torch_dist`); its metadata read and written as values.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`; the files it names hold one `torch.save`
for each chunk of a tensor and for each object. `common.pt` holds what is not sharded, `metadata.json` names the format.
Source: torch 2.13 `distributed/checkpoint/{metadata,filesystem}.py`, Megatron-Core 0.16.1 `dist_checkpointing/`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_asyncrl.checkpoint.convert.dtypes import ITEM_SIZES
from moe_asyncrl.checkpoint.convert.pickled import Built, Global, dump, load
from moe_asyncrl.checkpoint.convert.torch_zip import LOOKED_INTO, framed_at, locate, saved_object
from moe_asyncrl.data.errors import UserError

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
_OPEN_FILES = 64
_MODULE = "torch.distributed.checkpoint.metadata"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes of a file of the directory that hold one `torch.save`."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    slot: Slot


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of the checkpoint."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass
class DistcpDir:
    """A checkpoint's tensors and objects by key. `open` reads it; files are opened when they are asked for."""

    directory: Path
    tensors: Mapping[str, GlobalTensor]
    objects: Mapping[str, Slot]
    _files: dict[str, int] = field(default_factory=dict)
    _by_lead: dict[str, dict[tuple[int, ...], list[Chunk]]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path) -> DistcpDir:
        """Raises UserError: not such a checkpoint, another format, damaged, or a file that is missing or short."""
        check_format(directory)
        try:
            metadata = load((directory / METADATA).read_bytes())
            slots = {(key["fqn"], _sizes(key)): _slot(info) for key, info in metadata["storage_data"].items()}
            tensors, objects = {}, {}
            for key, found in metadata["state_dict_metadata"].items():
                if found.function.name == "TensorStorageMetadata":
                    tensors[key] = _tensor(key, found, slots)
                else:
                    objects[key] = slots[key, None]
        except OSError as error:
            raise UserError(f"{directory}: not a complete checkpoint: {METADATA}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{directory / METADATA} is damaged or of another version of torch: {error}") from error
        opened = cls(directory, tensors, objects)
        opened._check_files(slots.values())
        return opened

    def _check_files(self, slots: Any) -> None:
        ends: dict[str, int] = {}
        for slot in slots:
            ends[slot.file] = max(ends.get(slot.file, 0), slot.start + slot.length)
        problems = [] if (self.directory / COMMON).is_file() else [f"{COMMON} is missing"]
        for name, end in sorted(ends.items()):
            path = self.directory / name
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                problems.append(f"{name} is missing")
            elif size < end:
                problems.append(f"{name} has {size} bytes of {end}")
        if problems:
            raise UserError(f"{self.directory}: not a complete checkpoint: {'; '.join(problems)}")

    def look_ahead(self) -> None:
        """Let the kernel read both ends of every chunk, in which `payload` looks, many at a time."""
        slots: dict[str, list[Slot]] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                slots.setdefault(chunk.slot.file, []).append(chunk.slot)
        for name, found in slots.items():
            handle = os.open(self.directory / name, os.O_RDONLY)
            try:
                for slot in found:
                    for at in (slot.start, max(slot.start, slot.start + slot.length - LOOKED_INTO)):
                        os.posix_fadvise(handle, at, LOOKED_INTO, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def payload(self, tensor: GlobalTensor, chunk: Chunk) -> tuple[Path, int]:
        """File and byte at which a chunk's values begin. Raises UserError if they are not as the metadata say."""
        path = self.directory / chunk.slot.file
        handle, slot = self._handle(chunk.slot.file), chunk.slot
        framed = framed_at(handle, slot.start, slot.length, tensor.dtype, chunk.sizes)
        if framed is not None:
            return path, framed
        where = f"{path}: {tensor.key} at {list(chunk.offsets)}"
        found = locate(handle, slot.start, slot.length, where)
        if math.prod(found.shape) != math.prod(chunk.sizes) or found.dtype != tensor.dtype:
            raise UserError(
                f"{where}: holds {found.dtype} {list(found.shape)}, {METADATA} says {tensor.dtype} {list(chunk.sizes)}"
            )
        return path, found.offset

    def _handle(self, name: str) -> int:
        """A file's descriptor; the oldest ones are closed, since a large checkpoint has thousands of files."""
        if name not in self._files:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[name] = os.open(self.directory / name, os.O_RDONLY)
        return self._files[name]

    def chunks_at(self, tensor: GlobalTensor, lead: tuple[int, ...]) -> Sequence[Chunk]:
        """The chunks that have something at these indices of the first axes."""
        if tensor.key not in self._by_lead:
            found: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in tensor.chunks:
                axes = [range(a, a + n) for a, n in list(zip(chunk.offsets, chunk.sizes, strict=True))[: len(lead)]]
                for index in itertools.product(*axes):
                    found.setdefault(index, []).append(chunk)
            self._by_lead[tensor.key] = found
        return self._by_lead[tensor.key].get(lead, ())

    def close(self) -> None:
        """Close what was opened."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()


def is_distcp(directory: Path) -> bool:
    """Whether there is such a checkpoint in it, whole or not."""
    return (directory / FORMAT).is_file() or (directory / METADATA).is_file()


def metadata_bytes(tensors: Sequence[GlobalTensor], objects: Mapping[str, Slot]) -> bytes:
    """The content of `.metadata`."""
    state = {tensor.key: _tensor_record(tensor) for tensor in tensors}
    state |= {key: _instance("BytesStorageMetadata", {}) for key in objects}
    storage = {
        _index(tensor.key, chunk.offsets): _info(chunk.slot) for tensor in tensors for chunk in tensor.chunks
    } | {_index(key, None): _info(slot) for key, slot in objects.items()}
    record = {
        "state_dict_metadata": state,
        "planner_data": {},
        "storage_data": storage,
        "storage_meta": _instance(
            "StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
        ),
        "version": None,
    }
    return dump(_instance("Metadata", record))


def side_files() -> Iterator[tuple[str, bytes]]:
    """Name and content of the files that every checkpoint has beside its tensors and `.metadata`."""
    yield COMMON, saved_object({})  # Megatron-Core puts what is in it into every state dict that it loads
    yield FORMAT, json.dumps(_FORMAT).encode()


def check_format(directory: Path) -> None:
    """Raise UserError, saying what to name in its place, if it is no distributed checkpoint."""
    path = directory / FORMAT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        backend = found["sharded_backend"]
    except FileNotFoundError:
        raise UserError(
            f"{directory} has no {FORMAT}: not a distributed checkpoint of Megatron-Core{_inside(directory)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if backend != "torch_dist":
        raise UserError(f"{path}: the checkpoint's format is {backend!r}; only `torch_dist` can be read")


def _inside(directory: Path) -> str:
    """What to name instead, where runs keep their checkpoints in folders."""
    found = sorted(path.parent for pattern in ("*", "*/*") for path in directory.glob(f"{pattern}/{FORMAT}"))
    return f"; there are some in it: name one, such as {found[-1]}" if found else ""


def _tensor(key: str, found: Any, slots: Mapping[tuple[str, tuple[int, ...] | None], Slot]) -> GlobalTensor:
    properties = found["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    chunks = []
    for box in found["chunks"]:
        offsets = _ints(box["offsets"])
        chunks.append(Chunk(offsets, _ints(box["sizes"]), slots[key, offsets]))
    return GlobalTensor(key, _ints(found["size"]), str(dtype.name), tuple(chunks))


def _slot(info: Any) -> Slot:
    if info.state.get("transform_descriptors"):
        raise ValueError(f"{info['relative_path']} is compressed, which is not supported")
    name = str(info["relative_path"])
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name} lies outside of the checkpoint")
    return Slot(name, int(info["offset"]), int(info["length"]))


def _sizes(index: Any) -> tuple[int, ...] | None:
    offset = index.state.get("offset")
    return None if offset is None else _ints(offset)


def _ints(size: Any) -> tuple[int, ...]:
    """Of a `torch.Size`."""
    return tuple(map(int, size.arguments[0]))


def _instance(name: str, state: Any, module: str = _MODULE) -> Built:
    return Built(Global(module, name), (), state, is_instance=True)


def _size(sizes: tuple[int, ...]) -> Built:
    return Built(Global("torch", "Size"), (sizes,))


def _tensor_record(tensor: GlobalTensor) -> Built:
    layout = Built(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Built(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Global("torch", tensor.dtype), layout, False, contiguous, False)
    chunks = [
        _instance("ChunkStorageMetadata", {"offsets": _size(c.offsets), "sizes": _size(c.sizes)}) for c in tensor.chunks
    ]
    return _instance(
        "TensorStorageMetadata",
        {"properties": _instance("TensorProperties", properties), "size": _size(tensor.shape), "chunks": chunks},
    )


def _index(key: str, offsets: tuple[int, ...] | None) -> Built:
    return _instance(
        "MetadataIndex", {"fqn": key, "index": None, "offset": None if offsets is None else _size(offsets)}
    )


def _info(slot: Slot) -> Built:
    state = {"relative_path": slot.file, "offset": slot.start, "length": slot.length}
    return _instance("_StorageInfo", state, "torch.distributed.checkpoint.filesystem")
