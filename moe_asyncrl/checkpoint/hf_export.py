"""From a Megatron model of any layout to an HF directory that transformers and SGLang read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.formats.encode import Encoder, Fp8, Plain
from moe_asyncrl.checkpoint.formats.scales import CheckpointScales
from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir, has_weights
from moe_asyncrl.checkpoint.safetensors_writer import SafetensorsWriter
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import HfTensor
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.out_place import check_free
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.telemetry.run_folder import sync
from moe_asyncrl.weights.agree import agree
from moe_asyncrl.weights.gather import DEFAULT_BUCKET_BYTES, iter_hf_tensors

DEFAULT_SHARD_BYTES = 5 * 1000**3
Form = Literal["plain", "fp8"]
CARRIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def export_hf(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    layout: Layout,
    out_dir: str | Path,
    *,
    source_hf_dir: str | Path,
    dtype: torch.dtype | None = None,
    form: Form = "plain",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    max_bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the model to the new directory `out_dir`. Collective; the first rank writes, and all fail if one does.

    Config, tokenizer and chat template are those of `source_hf_dir`. `dtype` defaults to the type of that checkpoint;
    tensors that have a type of their own keep the one they have there. With the form `fp8`, the weights that are FP8 in
    `source_hf_dir` are written so again (`formats.encode.Fp8`), in the bytes that they have there if they have not
    changed; otherwise nothing is quantised.
    The files are written to a hidden directory beside `out_dir` that takes its name when it is whole, so that an
    interrupted export is never taken for a finished one. When this returns, on any rank, the directory is there.
    Weights whose all-gather is pending in an optimizer must be brought up to date by the caller first.

    Raises:
        UserError: `out_dir` is not empty, files are missing from `source_hf_dir` or it is not FP8 where that form is
            asked for, a parameter does not fit the layout, or another rank stopped.
        OSError: the disk is full or cannot be written.
    """
    out = Path(out_dir)
    if rank is None:
        rank = dist.get_rank(group) if dist.is_initialized() else 0
    dtype = dtype or getattr(torch, spec.torch_dtype)
    tensors = _with_stored_types(parameter_map(spec).hf_tensors(), Path(source_hf_dir))
    types = {t.name: getattr(torch, t.dtype) for t in tensors if t.dtype}
    partial: Path | None = None
    writer: SafetensorsWriter | None = None
    encoder: Encoder = Plain()
    with ExitStack() as cleanup:
        with agree(f"preparing the export to {out}", group=group):
            parameters = global_parameters(chunks, spec, layout, rank)
            if rank == 0:
                check_place(out, Path(source_hf_dir))
                if form == "fp8":
                    encoder = Fp8(CheckpointScales(cleanup.enter_context(SafetensorsDir(source_hf_dir))))
                partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
                cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
                _carry_files(Path(source_hf_dir), partial, dtype, encoder, drops_mtp=spec.mtp == "drop")
                files = SafetensorsWriter(partial, encoder.stored_tensors(tensors), dtype, max_shard_bytes)
                writer = cleanup.enter_context(files)
        buckets = cleanup.enter_context(
            closing(
                iter_hf_tensors(parameters, spec, layout, rank, dtype=dtype, group=group, max_bytes=max_bucket_bytes)
            )
        )
        for bucket in buckets:
            for name, value in bucket.items():
                if writer is not None and value is not None:
                    for stored, part in encoder.encode(name, value.to(types.get(name, dtype))).items():
                        writer.write(stored, part)
        with agree(f"writing {out}", group=group):
            if writer is not None and partial is not None:
                writer.close()
                publish(partial, out)


def check_place(out: Path, source: Path) -> None:
    """Make the folder that `out` will stand in. Raises UserError if it cannot, or `source` is no HF directory."""
    if not (source / "config.json").is_file():
        raise UserError(f"{source} has no config.json to copy from")
    check_free(out)


def check_form(form: Form, source: Path) -> None:
    """Raise UserError if nothing in `source` was published in the form that is asked for."""
    if form == "fp8":
        with SafetensorsDir(source) as stored:
            CheckpointScales(stored)


def _with_stored_types(tensors: Sequence[HfTensor], source: Path) -> list[HfTensor]:
    """Tensors with a type of their own take that of the source, where it has weights: checkpoints differ in it."""
    if not any(tensor.dtype for tensor in tensors) or not has_weights(source):
        return list(tensors)
    with SafetensorsDir(source) as stored:
        types = {name: str(found.dtype).removeprefix("torch.") for name, found in stored.tensors.items()}
    return [replace(t, dtype=types.get(t.name, t.dtype)) if t.dtype else t for t in tensors]


def _carry_files(source: Path, partial: Path, dtype: torch.dtype, encoder: Encoder, *, drops_mtp: bool) -> None:
    for name in CARRIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    path = partial / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    stored = str(dtype).removeprefix("torch.")
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    changes: dict[str, object] = dict.fromkeys(names, stored)
    if drops_mtp:
        changes |= {name: 0 for name in ("num_nextn_predict_layers", "num_mtp_layers") if name in config}
    changed = encoder.config(config | changes)
    if changed != config:
        path.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def publish(partial: Path, out: Path) -> None:
    """Give a directory that is whole its name, once all of it is on the disk. Raises OSError."""
    partial.chmod(0o755)
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    partial.rename(out)
    sync(out.parent)
