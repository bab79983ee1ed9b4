"""Upcycling a checkpoint on disk: a dense Llama directory in, a Mixtral directory out, a tensor at a time."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch

from moe_asyncrl.checkpoint.hf_export import CARRIED_FILES, DEFAULT_SHARD_BYTES, check_place, publish
from moe_asyncrl.checkpoint.hf_load import check_tensors
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.checkpoint.safetensors_writer import SafetensorsWriter
from moe_asyncrl.checkpoint.upcycle_plan import (
    Upcycling,
    mixtral_config,
    noisy_copy,
    router_weight,
    spread_of,
    steps,
    typed,
)
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.spec import ModelSpec


def upcycle(
    source: str | Path, out: str | Path, how: Upcycling | None = None, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> ModelSpec:
    """Write the mixture made of the dense model in `source` to the new directory `out`; returns its spec.

    Tokenizer, chat template and generation settings are carried over. The same tensors and arguments give the same
    tensors, byte for byte, however either side is cut into files. One tensor of the model is in memory at a time, with
    one expert made of it. The directory takes its name when it is whole.

    Raises:
        UserError: `source` is damaged, no Llama, or has what a Mixtral has not; `out` is taken; the disk is full.
    """
    source, out, how = Path(source), Path(out), how or Upcycling()
    dense = ModelSpec.from_hf(source)
    path = source / "config.json"
    config = mixtral_config(dense, json.loads(path.read_text(encoding="utf-8")), how, str(path))
    partial: Path | None = None
    with SafetensorsDir(source) as stored:
        spare_head = check_tensors(stored, dense)
        try:
            check_place(out, source)
            partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
            for name in CARRIED_FILES:
                if name != "config.json" and (source / name).is_file():
                    shutil.copyfile(source / name, partial / name)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            mixture = ModelSpec.from_hf(partial)
            if spare_head:
                _check_tied(stored)
            _write(stored, dense, mixture, how, partial, max_shard_bytes)
            publish(partial, out)
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
        finally:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
    return mixture


def _write(
    stored: SafetensorsDir, dense: ModelSpec, mixture: ModelSpec, how: Upcycling, partial: Path, max_shard_bytes: int
) -> None:
    plan = list(steps(dense, how))
    types = {name: stored.tensors[s.source.name].dtype for s in plan for name in (*s.copies, *s.noisy)}
    dtype: torch.dtype = getattr(torch, mixture.torch_dtype)
    with SafetensorsWriter(partial, typed(mixture, types), dtype, max_shard_bytes) as writer:
        for step in plan:
            value = stored.read(step.source.name)
            for name in step.copies:
                writer.write(name, value)
            spread = spread_of(value, step.source.name) if step.noisy else 0.0
            for name in step.noisy:
                writer.write(name, noisy_copy(value, spread, name, how))
            if step.router is not None:
                writer.write(step.router, router_weight(value, step.router, how, dtype))
        writer.close()


def _check_tied(stored: SafetensorsDir) -> None:
    if not torch.equal(stored.read("model.embed_tokens.weight"), stored.read("lm_head.weight")):
        raise UserError(
            f"{stored.directory}: config.json ties the output layer to the embedding, but lm_head.weight differs; "
            "set `tie_word_embeddings` to false or drop the tensor"
        )
