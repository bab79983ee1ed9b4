"""What the conversion tests run in each worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.hf_export import export_hf
from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.checkpoint.safetensors_writer import SafetensorsWriter
from moe_asyncrl.data.errors import DeadlineExceeded, UserError
from moe_asyncrl.models.features import Mtp
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.model import build_model
from moe_asyncrl.weights import gather as gather_module
from moe_asyncrl.weights.gather import iter_hf_tensors
from tests.pool.machine import CPU
from tests.train.parity_jobs import packed

LENGTHS = (11, 21)
"""Lengths of the sequences that are compared, packed into one."""


def tokens_for(spec: ModelSpec) -> torch.Tensor:
    """[1, tokens] int64, over the whole vocabulary."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, spec.vocab_size, (1, sum(LENGTHS)), generator=generator)


def convert(
    layout: Layout, hf_dir: str, out_dir: str | None = None, spec_dir: str | None = None, mtp: Mtp = "unsaid"
) -> Any:
    """Load, compute the logits [tokens, vocabulary] (on the ranks of the last stage), export if `out_dir` is given."""
    spec = ModelSpec.from_hf(spec_dir or hf_dir).with_mtp(mtp)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    found = logits(chunks, spec, layout)
    if out_dir is not None:
        # Buckets far smaller than the embedding, and files of a few buckets.
        export_hf(chunks, spec, layout, out_dir, source_hf_dir=hf_dir, max_bucket_bytes=20_000, max_shard_bytes=10**9)
    return found


def logits(chunks: list[Any], spec: ModelSpec, layout: Layout) -> Any:
    """One packed micro-batch through all stages."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(batches)
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        output = model(tokens, positions, None, packed_seq_params=packed(LENGTHS))
        return output, lambda output, non_loss_data: output

    # An interleaved schedule needs as many micro-batches as stages; all are the same here.
    count = layout.pp if layout.vpp else 1
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter([tokens_for(spec)] * count) for _ in chunks],
            model=chunks,
            num_microbatches=count,
            seq_length=sum(LENGTHS),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not outputs:
        return None
    local = outputs[0][0].contiguous()
    parts = [torch.empty_like(local) for _ in range(layout.tp)]
    dist.all_gather(parts, local, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)[:, : spec.vocab_size].numpy()


def error_of_load(layout: Layout, hf_dir: str, spec_dir: str) -> str:
    """The error with which every rank leaves a load that cannot succeed."""
    spec = ModelSpec.from_hf(spec_dir)
    try:
        load_hf(build_model(spec, layout, CPU), spec, layout, hf_dir)
    except UserError as error:
        return str(error)
    return ""


def export_with_full_disk(layout: Layout, hf_dir: str, out_dir: str) -> str:
    """An export in which the first rank cannot write its third tensor; the error of each rank."""
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    write, calls = SafetensorsWriter.write, []

    def failing(self: SafetensorsWriter, name: str, value: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 3:
            raise OSError(28, os.strerror(28))
        write(self, name, value)

    SafetensorsWriter.write = failing  # type: ignore[method-assign]
    try:
        export_hf(chunks, spec, layout, out_dir, source_hf_dir=hf_dir, max_bucket_bytes=20_000)
    except (UserError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        SafetensorsWriter.write = write  # type: ignore[method-assign]
    return ""


def export_killed(layout: Layout, hf_dir: str, out_dir: str) -> None:
    """An export whose process ends in the middle, without any clean-up."""
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    SafetensorsWriter.write = lambda *_: os._exit(9)  # type: ignore[method-assign]
    export_hf(chunks, spec, layout, out_dir, source_hf_dir=hf_dir)


def gather(
    layout: Layout,
    hf_dir: str,
    max_bytes: int,
    close_on: int | None = None,
    drop_on: int | None = None,
    die_on: int | None = None,
) -> Any:
    """Gather all HF tensors in bfloat16: (names, largest bucket in bytes, tensors or None), or the text of the error.

    Rank `close_on` leaves after its second bucket; rank `drop_on` lacks a parameter; the process of rank `die_on` ends
    when its first part is due.
    """
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    parameters: dict[str, torch.Tensor] = dict(global_parameters(chunks, spec, layout, dist.get_rank()))
    if dist.get_rank() == drop_on:
        del parameters["decoder.layers.0.mlp.router.weight"]
    if dist.get_rank() == die_on:
        gather_module.pack = lambda *_: os._exit(9)  # type: ignore[assignment]
    names, largest, found = [], 0, {}
    try:
        buckets = iter_hf_tensors(
            parameters, spec, layout, dist.get_rank(), dtype=torch.bfloat16, max_bytes=max_bytes, timeout_s=20
        )
        with contextlib.closing(buckets):
            for number, bucket in enumerate(buckets):
                if number == 2 and dist.get_rank() == close_on:
                    return "left"
                largest = max(largest, sum(t.numel for t in bucket.tensors) * 2)
                for name, value in bucket.items():
                    names.append(name)
                    assert (value is None) == (dist.get_rank() > 0)
                    if value is not None:
                        found[name] = value.float().numpy()
    except DeadlineExceeded:
        raise
    except UserError as error:
        return str(error)
    return names, largest, found or None


def bf16_in_fp32(layout: Layout, hf_dir: str, out_dir: str) -> float:
    """Load with rounding to bfloat16 and export in that type; the share of parameters that the rounding changed."""
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    exact = [p.detach().clone() for c in chunks for p in c.parameters()]
    load_hf(chunks, spec, layout, hf_dir, dtype=torch.bfloat16)
    rounded = [p.detach() for c in chunks for p in c.parameters()]
    assert all(torch.equal(r, e.bfloat16().float()) for r, e in zip(rounded, exact, strict=True))
    export_hf(chunks, spec, layout, out_dir, source_hf_dir=hf_dir, dtype=torch.bfloat16, max_shard_bytes=150_000)
    changed = [(r != e).float().mean() for r, e in zip(rounded, exact, strict=True)]
    return float(np.mean(changed))


def last_embedding_row(layout: Layout, hf_dir: str) -> float:
    """Largest absolute value in the last row of this rank's embedding and output layer, after they held garbage."""
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU)
    load_hf(chunks, spec, layout, hf_dir)
    found = global_parameters(chunks, spec, layout, dist.get_rank())
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return max(float(found[name][-1].abs().max()) for name in names)
