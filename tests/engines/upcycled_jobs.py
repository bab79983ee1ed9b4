"""What the trainer's ranks do in the test of a real model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.checkpoint.megatron_names import global_parameters
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.model import build_model
from tests.pool.machine import CPU
from tests.train.parity_jobs import packed


def score(layout: Layout, hf_dir: str, ids: list[int], swap_in: int) -> tuple[list[float], list[float]]:
    """Log-probabilities of ids[1:] in float64, then the same with experts 0 and 1 of layer `swap_in` exchanged.

    Layouts of one pipeline stage and one tensor-parallel rank; every rank scores the whole text.
    """
    spec = ModelSpec.from_hf(hf_dir)
    chunks = build_model(spec, layout, CPU, dtype=torch.float64, router_dtype="fp64")
    load_hf(chunks, spec, layout, hf_dir)
    right = _logprobs(chunks[0], ids)
    parameters = global_parameters(chunks, spec, layout, dist.get_rank())
    for which in ("linear_fc1", "linear_fc2"):
        names = [f"decoder.layers.{swap_in}.mlp.experts.local_experts.{expert}.{which}.weight" for expert in (0, 1)]
        if names[0] in parameters:
            a, b = (parameters[name].data for name in names)
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
    return right, _logprobs(chunks[0], ids)


def _logprobs(model: torch.nn.Module, ids: list[int]) -> list[float]:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(tokens, torch.arange(len(ids))[None], None, packed_seq_params=packed((len(ids),)))[0]
        found = torch.log_softmax(logits[:-1], -1).gather(1, tokens[0, 1:, None])
    return [float(value) for value in found[:, 0]]
