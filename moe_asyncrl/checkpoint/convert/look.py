"""`inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_asyncrl.checkpoint.convert.carried import FOLDER
from moe_asyncrl.checkpoint.convert.compare import check_readable
from moe_asyncrl.checkpoint.convert.distcp import DistcpDir
from moe_asyncrl.checkpoint.convert.hf_files import read_directory
from moe_asyncrl.checkpoint.convert.opening import config_of, is_megatron, open_whole
from moe_asyncrl.checkpoint.convert.progress import gigabytes
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.counts import count
from moe_asyncrl.models.features import Mtp
from moe_asyncrl.models.spec import ModelSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def inspect_lines(path: Path, *, config: Path | None, mtp: Mtp | None, keys: bool) -> Iterator[str]:
    """What to show of a checkpoint, whole or not.

    Raises:
        UserError: it is no checkpoint, or its headers cannot be read.
    """
    megatron = is_megatron(path)
    yield f"kind        {'distributed checkpoint of Megatron-Core (torch_dist)' if megatron else 'HF, safetensors'}"
    yield from _model_lines(path, config)
    if megatron:
        opened = DistcpDir.open(path)
        tensors = [(t.key, t.shape, t.dtype, t.nbytes) for t in opened.tensors.values()]
        files = {chunk.slot.file for tensor in opened.tensors.values() for chunk in tensor.chunks}
        chunks = sum(len(tensor.chunks) for tensor in opened.tensors.values())
        yield f"objects     {len(opened.objects)}"
        yield f"chunks      {chunks} in {len(files)} files"
        if (path / FOLDER).is_dir():
            yield f"carries     {', '.join(sorted(p.name for p in (path / FOLDER).iterdir()))}"
    else:
        found = read_directory(path)
        tensors = [(t.name, t.shape, t.dtype, t.nbytes) for t in found.values()]
        quantised = sum(t.offset is None for t in found.values())
        yield f"files       {len({t.file for t in found.values()})}"
        if quantised:
            yield f"quantised   {quantised} tensors, shown as what they are read as"
    sizes: Counter[str] = Counter()
    for _, _, dtype, nbytes in tensors:
        sizes[dtype] += nbytes
    yield f"tensors     {len(tensors)}, {gigabytes(sum(sizes.values()))}"
    yield "types       " + ", ".join(f"{dtype} {gigabytes(size)}" for dtype, size in sizes.most_common())
    yield f"complete    {_completeness(path, config, mtp)}"
    yield from _keys(((key, shape, dtype) for key, shape, dtype, _ in tensors), every=keys)


def _model_lines(path: Path, config: Path | None) -> Iterator[str]:
    try:
        spec = ModelSpec.from_hf(config_of(path, config))
    except UserError as error:
        yield f"model       not known: {error}"
        return
    counts = count(spec)
    experts = f", {spec.num_experts} experts of which {spec.experts_per_token} a token" if spec.is_moe else ""
    yield f"family      {spec.family} ({spec.architecture})"
    yield f"layers      {spec.num_layers}, {spec.num_moe_layers} of them MoE{experts}"
    yield f"sizes       hidden {spec.hidden_size}, vocabulary {spec.vocab_size}, {spec.num_attention_heads} heads"
    yield f"parameters  {counts.total:,} ({counts.active:,} a token)"
    if spec.mtp_layers:
        yield f"mtp         {spec.mtp_layers} multi-token-prediction layers announced, {counts.mtp:,} parameters"


def _completeness(path: Path, config: Path | None, mtp: Mtp | None) -> str:
    try:
        checkpoint, _ = open_whole(path, config_of(path, config), mtp)
        check_readable(checkpoint)
    except UserError as error:
        return f"no: {error}"
    checkpoint.close()
    return "yes: every tensor of the model is there once, in its shape, and nothing else"


def _keys(tensors: Iterable[tuple[str, tuple[int, ...], str]], *, every: bool) -> Iterator[str]:
    """A line for each key, or for each kind of key: those that differ only in numbers."""
    kinds: dict[tuple[str, tuple[int, ...], str], int] = {}
    for key, shape, dtype in tensors:
        kind = (key if every else _NUMBER.sub("*", key), shape, dtype)
        kinds[kind] = kinds.get(kind, 0) + 1
    yield ""
    for (key, shape, dtype), number in kinds.items():
        times = f"  x {number}" if number > 1 else ""
        yield f"{key}  {dtype} {list(shape)}{times}"
