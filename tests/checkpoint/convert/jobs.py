"""What the conversion tests run in each worker: real models, and Megatron-Core's own save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.model import build_model
from tests.pool.machine import CPU

Box = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Key, shape of the global tensor, offsets and sizes of a rank's part, in the global tensor's axes."""


def sharded(chunks: list[Any]) -> dict[str, Any]:
    """Sharded state of all chunks, as the trainer names them."""
    return {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}


def boxes(layout: Layout, hf_dir: str) -> dict[str, Any]:
    """What Megatron-Core's `sharded_state_dict` says of this rank's model."""
    spec = ModelSpec.from_hf(hf_dir)
    return boxes_of(build_model(spec, layout, CPU))


def boxes_of(chunks: list[Any]) -> dict[str, Any]:
    """Boxes of tensors, padded keys, and unique keys of objects, with factories carried out."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    state = sharded(chunks)
    apply_factories(state)
    tensors: list[Box] = []
    padded, objects = set(), set()
    for value in nested_values(state):
        if isinstance(value, ShardedObject):
            objects.add(value.unique_key)
        elif isinstance(value, ShardedTensor):
            sizes = (1,) * value.prepend_axis_num + tuple(value.local_shape)
            tensors.append((value.key, tuple(value.global_shape), tuple(value.global_offset), sizes))
            if value.allow_shape_mismatch:
                padded.add(value.key)
    return {"tensors": tensors, "padded": padded, "objects": objects}


def exchange(layout: Layout, hf_dir: str, checkpoint: str, saved: str | None, dtype: str = "float32") -> list[str]:
    """Load `checkpoint` into a model by Megatron-Core and save another model, loaded from `hf_dir`, to `saved`.

    Returns what is not bit for bit the same in both models, buffers that are weights included.
    """
    from megatron.core import dist_checkpointing

    spec = ModelSpec.from_hf(hf_dir)
    expected = build_model(spec, layout, CPU, dtype=getattr(torch, dtype))
    load_hf(expected, spec, layout, hf_dir)
    found = build_model(spec, layout, CPU, dtype=getattr(torch, dtype))
    loaded = dist_checkpointing.load(sharded(found), checkpoint)
    for i, chunk in enumerate(found):
        chunk.load_state_dict(loaded[f"model{i}"])
    if saved is not None:
        if dist.get_rank() == 0:
            Path(saved).mkdir()
        dist.barrier()
        dist_checkpointing.save(sharded(expected), saved)
    return unlike(expected, found)


def unlike(expected: list[Any], found: list[Any]) -> list[str]:
    """Names of parameters and persistent buffers that differ in a bit."""
    names = []
    for a, b in zip(expected, found, strict=True):
        theirs = b.state_dict()
        for name, value in a.state_dict().items():
            if isinstance(value, torch.Tensor) and not same_bits(value, theirs[name]):
                names.append(name)
    return names


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def stock_model(spec: ModelSpec, layout: Layout, *, vocab_size: int, layer_frequency: bool) -> Any:
    """A `GPTModel` as a user of Megatron-Core alone builds it; no code of this project is in it.

    `layer_frequency`: `moe_layer_freq` is the number 1, so that layers are stacked in checkpoints.
    """
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if spec.is_moe:
        moe = {
            "num_moe_experts": spec.num_experts,
            "moe_router_topk": spec.experts_per_token,
            "moe_ffn_hidden_size": spec.moe_intermediate_size,
            "moe_layer_freq": 1 if layer_frequency else [1] * spec.num_layers,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": layout.ep,
        }
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.intermediate_size,
        normalization="RMSNorm",
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        **moe,
    )
    layers = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=spec.tie_embeddings,
    )


def stock_exchange(
    layout: Layout, hf_dir: str, checkpoint: str, saved: str, vocab_size: int, layer_frequency: bool
) -> dict[str, Any]:
    """Load `checkpoint` into a stock model with a padded vocabulary, fill the padding with garbage, and save it.

    Returns what differs from the model that `load_hf` fills, and the largest value in the padding when it was loaded.
    """
    from megatron.core import dist_checkpointing

    from moe_asyncrl.checkpoint.megatron_names import global_parameters

    spec = ModelSpec.from_hf(hf_dir)
    stock = stock_model(spec, layout, vocab_size=vocab_size, layer_frequency=layer_frequency)
    loaded = dist_checkpointing.load({"model": stock.sharded_state_dict()}, checkpoint)
    stock.load_state_dict(loaded["model"])
    mine = build_model(spec, layout, CPU)
    load_hf(mine, spec, layout, hf_dir)
    expected = global_parameters(mine, spec, layout, dist.get_rank())
    first = dist.get_rank() % layout.tp * (vocab_size // layout.tp)
    padding, wrong, seen = 0.0, [], 0
    experts = layout.experts_of(layout.coordinates(dist.get_rank()).ep, spec.num_experts) if spec.is_moe else range(0)
    for name, value in stock.named_parameters():
        if "local_experts." in name:
            head, _, tail = name.partition("local_experts.")
            number, _, rest = tail.partition(".")
            name = f"{head}local_experts.{experts[int(number)]}.{rest}"
        value = value.data
        if "word_embeddings" in name or "output_layer" in name:
            real = min(max(0, spec.vocab_size - first), len(value))
            padding = max(padding, float(value[real:].abs().max()) if real < len(value) else 0.0)
            value[real:] = 7.0
            whole = hf_rows(hf_dir, name)
            if not same_bits(value[:real], whole[first : first + real]):
                wrong.append(name)
        elif not same_bits(value, expected[name]):
            wrong.append(name)
        seen += 1
    if dist.get_rank() == 0:
        Path(saved).mkdir()
    dist.barrier()
    dist_checkpointing.save({"model": stock.sharded_state_dict()}, saved)
    return {"wrong": wrong, "seen": seen, "padding": padding}


def hf_rows(hf_dir: str, name: str) -> torch.Tensor:
    """Embedding or output layer of a checkpoint."""
    from safetensors.torch import load_file

    tensors = load_file(Path(hf_dir) / "model.safetensors")
    return tensors["model.embed_tokens.weight" if "word_embeddings" in name else "lm_head.weight"]


def train_checkpoint(layout: Layout, hf_dir: str, checkpoints: str) -> str:
    """A checkpoint of this project's trainer, optimizer and all, before its first step; its folder."""
    from moe_asyncrl.train import checkpoint
    from moe_asyncrl.train.build import build_train_state
    from tests.train.checkpoint_jobs import SETTINGS, info_of

    spec = ModelSpec.from_hf(hf_dir)
    state = build_train_state(spec, layout, CPU, SETTINGS, rank=dist.get_rank(), hf_dir=hf_dir)
    return str(checkpoint.save(state, Path(checkpoints), info_of(state, 0), keep=1))


def model_with_mtp(spec: ModelSpec, layout: Layout) -> Any:
    """A `GPTModel` with Megatron-Core's own multi-token-prediction block, which the trainer does not build."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moe_asyncrl.train.model import transformer_config
    from moe_asyncrl.train.specs.layers import block_spec
    from moe_asyncrl.train.specs.positions import position_arguments

    config = transformer_config(spec.with_mtp("drop"), layout, CPU, mtp_num_layers=spec.mtp_layers)
    layers = block_spec(config, CPU)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False),
        vocab_size=spec.padded_vocab_size(layout.tp),
        max_sequence_length=64,
        share_embeddings_and_output_weights=spec.tie_embeddings,
        **position_arguments(spec),
    )


def mtp_boxes(layout: Layout, hf_dir: str) -> dict[str, Any]:
    """As `boxes`, with multi-token-prediction layers."""
    return boxes_of([model_with_mtp(ModelSpec.from_hf(hf_dir), layout)])


def mtp_through(layout: Layout, hf_dir: str, checkpoint: str, saved: str) -> None:
    """Load `checkpoint` into a model with multi-token-prediction layers, and save that model to `saved`."""
    from megatron.core import dist_checkpointing

    model = model_with_mtp(ModelSpec.from_hf(hf_dir), layout)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), checkpoint))
    if dist.get_rank() == 0:
        Path(saved).mkdir()
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), saved)
