"""From an HF directory straight into a Megatron model: each rank reads the rectangles that it owns, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moe_asyncrl.checkpoint.ledger import Ledger
from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.checkpoint.safetensors_dir import SafetensorsDir
from moe_asyncrl.data.errors import UserError
from moe_asyncrl.models.algebra import Block
from moe_asyncrl.models.assemble import assemble
from moe_asyncrl.models.families.mtp import described, is_of_mtp
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.parameter_map import parameter_map
from moe_asyncrl.models.shards import rank_shards
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.weights.agree import agree

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_hf(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    layout: Layout,
    hf_dir: str | Path,
    *,
    rank: int | None = None,
    dtype: torch.dtype | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Load the weights of `hf_dir` into this rank's model chunks, in place.

    Values are converted to each parameter's own dtype; with `dtype` they are rounded to that one first, but for tensors
    with a type of their own. An optimizer
    that keeps copies of the weights must be told to reload them afterwards.

    Every rank of the trainer calls this, and all of them fail if one does. `rank` defaults to that of
    torch.distributed, or 0 without it.

    Raises:
        UserError: the checkpoint is damaged; HF tensors or Megatron parameters are missing, extra or of another shape.
            Nothing is said to be loaded then, and the model must not be used.
    """
    if rank is None:
        rank = torch.distributed.get_rank(group) if torch.distributed.is_initialized() else 0
    with agree(f"loading {hf_dir}", group=group):
        _load(chunks, spec, layout, Path(hf_dir), rank, dtype)


def _load(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    layout: Layout,
    hf_dir: Path,
    rank: int,
    dtype: torch.dtype | None,
) -> None:
    parameters = global_parameters(chunks, spec, layout, rank)
    with SafetensorsDir(hf_dir) as stored:
        spare_head = check_tensors(stored, spec)

        def read(block: Block) -> torch.Tensor:
            value = stored.read(block.hf.name, block.hf_slices)
            if spare_head and block.hf.name == _EMBEDDING:
                _check_tied(value, stored.read(_HEAD, block.hf_slices), hf_dir)
            return value if dtype is None or block.hf.dtype is not None else value.to(dtype)

        for shard in rank_shards(spec, layout, rank):
            assemble(shard, read, parameters[shard.entry.name].data)


def _check_tied(embedding: torch.Tensor, head: torch.Tensor, hf_dir: Path) -> None:
    if not torch.equal(embedding, head):
        raise UserError(
            f"{hf_dir}: config.json ties the output layer to the embedding, but {_HEAD} differs from {_EMBEDDING}; "
            "set `tie_word_embeddings` to false or drop the tensor"
        )


def check_tensors(stored: SafetensorsDir, spec: ModelSpec) -> bool:
    """Check names and shapes of a checkpoint against the model.

    Returns True if a tied model's checkpoint has an output layer of its own, which then must equal the embedding.
    Raises UserError with all missing and extra names, with the first tensor of another shape, or because nobody said
    what to do with multi-token-prediction weights (`ModelSpec.with_mtp`).
    """
    tensors = parameter_map(spec).hf_tensors()
    ledger = Ledger((t.name for t in tensors), what="HF tensors", where=str(stored.directory))
    spare_head = spec.tie_embeddings and _HEAD in stored.tensors
    unused = _unused_mtp(stored, spec)
    for name in stored.tensors:
        if not (spare_head and name == _HEAD) and name not in unused:
            ledger.enter(name)
    ledger.settle()
    for tensor in tensors:
        stored.check_shape(tensor.name, tensor.shape)
    if spare_head:
        stored.check_shape(_HEAD, (spec.vocab_size, spec.hidden_size))
    return spare_head


def _unused_mtp(stored: SafetensorsDir, spec: ModelSpec) -> frozenset[str]:
    """Tensors of multi-token-prediction layers that are left out by an explicit word."""
    if spec.mtp == "keep":
        return frozenset()
    found = frozenset(name for name in stored.tensors if is_of_mtp(spec, name))
    if found and spec.mtp == "unsaid":
        raise UserError(
            f"{stored.directory} holds {described(spec, found)}; say what becomes of them: `drop` reads and writes the "
            "model without them"
        )
    return found
