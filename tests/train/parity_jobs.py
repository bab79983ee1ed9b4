"""What the parity tests run in each worker: one loss and its gradients, under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from tests.pool.machine import CPU
from tests.train.sharded import Part, fill, gradients

MICRO_BATCHES = ((5, 19, 8), (30, 2), (7, 7, 7, 11), (26, 1, 1))
"""Lengths of the packed sequences of each micro-batch of a global batch: uneven, but their sums split over tp 2."""
SPLITTABLE = ((4, 20, 8), (28, 4), (8, 4, 12, 8), (24, 4, 4))
"""The same in multiples of 2 * cp = 4, which context parallelism needs."""

Lengths = tuple[tuple[int, ...], ...]


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Qwen3-MoE of 4 layers, the first one dense."""
    fields: dict[str, Any] = {
        "family": "qwen3_moe",
        "architecture": "Qwen3MoeForCausalLM",
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "experts_per_token": 2,
        "moe_layers": (False, True, True, True),
        "vocab_size": 259,
        "max_position_embeddings": 128,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_embeddings": False,
        "qk_norm": True,
        "norm_topk_prob": True,
        "attention_bias": False,
        "eos_token_ids": (257,),
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    return ModelSpec(**(fields | changes))


def packed(lengths: tuple[int, ...]) -> Any:
    """Megatron-Core's description of sequences packed one after the other."""
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def micro_batch(number: int, vocab_size: int, lengths: Lengths = MICRO_BATCHES) -> dict[str, Any]:
    """Micro-batch `number` of the global batch: tokens, labels and loss mask [1, tokens], and its packing.

    Under context parallelism, this rank's parts of the tokens.
    """
    from megatron.core import parallel_state

    from megatron_patches.packed_rope import packed_positions

    generator = torch.Generator().manual_seed(100 + number)
    total = sum(lengths[number])
    tokens = torch.randint(0, vocab_size, (1, total + 1), generator=generator)
    mask = (torch.rand((1, total), generator=generator) < 0.7).float()
    packing = packed(lengths[number])
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    offsets = packing.cu_seqlens_q
    own = torch.repeat_interleave(offsets[:-1], offsets.diff() // size) + packed_positions(offsets, rank, size)
    return {
        "tokens": tokens[:, :-1][:, own],
        "labels": tokens[:, 1:][:, own],
        "mask": mask[:, own],
        "packed": packing,
    }


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron-Core's forward step: the sum of the masked token losses, and the number of tokens in it."""
    batch = next(batches)
    output = model(batch["tokens"], None, None, labels=batch["labels"], packed_seq_params=batch["packed"])

    def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = (output.float() * mask).sum()
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"loss": torch.stack([total.detach(), tokens.float()])}

    return output, partial(loss, batch["mask"])


def loss_and_gradients(
    spec: ModelSpec, layout: Layout, plant: str | None = None, lengths: Lengths = MICRO_BATCHES, **build: Any
) -> tuple[float, list[Part]]:
    """Mean token loss of the global batch, and this rank's parts of its gradients.

    The loss stands on the last pipeline stage; other ranks report NaN. `plant` is a switch of `fill`.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from moe_asyncrl.train.model import build_model, wrap_ddp

    chunks = build_model(spec, layout, CPU, **build)
    fill(chunks, vocab_size=spec.vocab_size, **({plant: True} if plant else {}))
    model = wrap_ddp(chunks)
    rank, copies = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = [micro_batch(number, spec.vocab_size, lengths) for number in range(rank, len(lengths), copies)]
    for wrapped in model:
        wrapped.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(own) for _ in model] if len(model) > 1 else iter(own),
        model=model if len(model) > 1 else model[0],
        num_microbatches=len(own),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([report["loss"] for report in reports]).sum(0) if reports else torch.full((2,), float("nan"))
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total[0] / total[1]), gradients(model)


def logit_spread(spec: ModelSpec, layout: Layout) -> float:
    """Standard deviation of the logits of the first micro-batch on one rank."""
    from moe_asyncrl.train.model import build_model

    (chunk,) = build_model(spec, layout, CPU)
    fill([chunk], vocab_size=spec.vocab_size)
    batch = micro_batch(0, spec.vocab_size)
    with torch.no_grad():
        return float(chunk(batch["tokens"], None, None, packed_seq_params=batch["packed"]).std())
