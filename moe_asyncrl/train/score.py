"""Log-probabilities of given tokens under the trainer's weights, without gradients, with routing replayed or live."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from moe_asyncrl.replay.controller import Mode, ReplayStats
from moe_asyncrl.train.batch import MicroBatch, Sample, make_micro_batch
from moe_asyncrl.train.logprobs import token_logprobs
from moe_asyncrl.train.passes import ModelOnRank, run_passes
from moe_asyncrl.train.plan import packing_for


def logprobs_of_batches(
    model: ModelOnRank,
    batches: Sequence[MicroBatch],
    *,
    temperature: float,
    mode: Mode = "off",
    allow_missing: bool = False,
) -> tuple[list[Tensor] | None, ReplayStats | None]:
    """Log-probability of every label of this rank's micro-batches, float32 [n] each; None off the last pipeline stage.

    Inside the micro-batch's support where the sampler truncated.

    Collective over the trainer's ranks.
    """

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        found = token_logprobs(logits, batch.labels, temperature=temperature, support=batch.support)[0]
        return torch.zeros((), device=found.device), {"logprobs": found}

    with torch.no_grad():
        reports, stats = run_passes(model, batches, loss_of, forward_only=True, mode=mode, allow_missing=allow_missing)
    return ([r["logprobs"] for r in reports] if model.has_last_stage else None), stats


def score(
    model: ModelOnRank,
    samples: Sequence[Sample],
    *,
    temperature: float,
    mode: Mode = "off",
    allow_missing: bool = False,
    micro_batch_tokens: int = 8192,
) -> tuple[list[npt.NDArray[np.float32]], ReplayStats | None]:
    """Log-probability of every token of the samples; float32 [T] each, NaN for the first token. The same on all ranks.

    It is renormalised inside a sample's mask where that has ids, else over the whole vocabulary.

    The second value is what this rank's routers counted; None in mode `off`.

    Collective: every rank gives the same samples, and computes its data-parallel share of them.

    Raises:
        ReplayMismatch: routing rows do not fit, or are missing without permission (modes `replay` and `observe`).
    """
    lengths = [len(s.tokens) - 1 for s in samples]
    packing = packing_for(lengths, model.layout, micro_batch_tokens=micro_batch_tokens)
    mine = packing.ranks[model.layout.coordinates(model.rank).dp]
    router = model.router_shape if mode != "off" else None
    batches = [
        make_micro_batch(
            [samples[i] for i in numbers],
            layout=model.layout,
            router=router,
            device=model.device,
            rank=model.rank,
            vocabulary=model.vocabulary,
        )
        for numbers in mine
    ]
    found, stats = logprobs_of_batches(model, batches, temperature=temperature, mode=mode, allow_missing=allow_missing)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Each position stands on one rank that counts; summed with the zeros of all others, everyone has everything.
    everything = torch.zeros(int(starts[-1]), dtype=torch.float32, device=model.device)
    if model.counts and found is not None:
        for numbers, batch, values in zip(mine, batches, found, strict=True):
            real = batch.at.real
            # Behind the last one: the sequence of padding.
            place = starts[[*numbers, -1]][batch.at.sequence[real]] + batch.at.position[real]
            everything[torch.from_numpy(place).to(model.device)] = values[~batch.padding]
    dist.all_reduce(everything)
    flat = everything.cpu().numpy()
    whole = [np.concatenate([[np.float32("nan")], flat[a:b]]).astype(np.float32) for a, b in pairwise(starts)]
    return whole, stats
