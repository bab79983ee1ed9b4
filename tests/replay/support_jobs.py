"""What the tests of sampling masks run in each worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from moe_asyncrl.data.trajectory import SamplingMask
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.batch import Sample
from tests.replay.jobs import build
from tests.train.parity_jobs import tiny_spec
from tests.train.sharded import Part
from tests.train.step_jobs import OBJECTIVE, micro_batches, model_of, samples
from tests.train.update_jobs import random_logits


def scored(layout: Layout, *, hf_dir: str, given: list[Sample], temperature: float) -> list[np.ndarray]:
    """Log-probabilities of every token of `given` under the trainer's weights, with the sampler's experts."""
    from moe_asyncrl.train.score import score

    return score(build(layout, hf_dir), given, temperature=temperature, mode="replay", micro_batch_tokens=96)[0]


def kept_ids(labels: torch.Tensor, vocabulary: int, *, seed: int = 7) -> list[list[int]]:
    """Ids around each of the labels [n], few, many, the label alone, or none."""
    draw = np.random.default_rng(seed)
    sizes = draw.choice([0, 1, 3, vocabulary // 2, vocabulary], size=len(labels))
    rows = zip(labels.tolist(), sizes.tolist(), strict=True)
    return [sorted({label, *draw.permutation(vocabulary)[:n].tolist()}) if n else [] for label, n in rows]


def operator(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities float32 [n] and their weighted sum's gradient for this rank's part of random logits."""
    from megatron.core import parallel_state

    from moe_asyncrl.replay.masks import Support
    from moe_asyncrl.train.logprobs import token_logprobs

    logits, labels, weights = random_logits()
    part = 50 // layout.tp
    start = part * parallel_state.get_tensor_model_parallel_rank()
    mine = logits[..., start : start + part].clone().requires_grad_()
    rows = kept_ids(labels[0], 50)
    counts = torch.tensor([len(r) for r in rows])
    support = Support(counts, torch.tensor([i for r in rows for i in r]).int(), counts > 0).within(
        range(start, start + part)
    )
    found = token_logprobs(mine, labels, temperature=0.7, support=support)
    (found * weights).sum().backward()
    assert mine.grad is not None
    return found.detach().numpy()[0], mine.grad.numpy()[0]


def masked_samples(*, plant: str | None = None) -> list[Sample]:
    """The step's samples with masks on most trained tokens; the `last` kept id of each can be left out, or all."""
    made = []
    for number, s in enumerate(samples(tiny_spec())):
        rows = kept_ids(torch.from_numpy(s.tokens), tiny_spec().vocab_size, seed=number)
        rows = [r if on else [] for r, on in zip(rows, s.trained, strict=True)]
        if plant == "last":
            rows = [r[:-1] if len(r) > 1 and r[-1] != token else r for r, token in zip(rows, s.tokens, strict=True)]
        indptr = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
        mask = SamplingMask(indptr, np.array([i for r in rows for i in r], dtype=np.int32))
        made.append(s if plant == "all" or number == 2 else dataclasses.replace(s, mask=mask))
    return made


def policy_gradients(layout: Layout, *, tokens: int = 48, plant: str | None = None) -> tuple[float, list[Part]]:
    """The loss and this rank's gradients of one batch of masked samples."""
    from moe_asyncrl.train.step import gradients as step_gradients
    from tests.train.sharded import gradients

    spec = tiny_spec()
    model = model_of(spec, layout)
    batches = micro_batches(
        masked_samples(plant=plant), spec, layout, tokens=tokens, replay=False, vocabulary=model.vocabulary
    )
    totals = step_gradients(model, batches, OBJECTIVE)
    return totals.sums["loss"], gradients(model.ddp)


def plain_gradients(layout: Layout) -> tuple[float, list[Part]]:
    """The same written out plainly: one sequence at a time, a dense mask, softmax and loss in float64."""
    from tests.train.sharded import gradients

    spec = tiny_spec()
    model: Any = model_of(spec, layout)
    for wrapped in model.ddp:
        wrapped.zero_grad_buffer()
    given = masked_samples()
    trained = sum(int(s.trained.sum()) for s in given)
    total = torch.zeros((), dtype=torch.float64)
    for s in given:
        on = torch.from_numpy(s.trained[1:])
        if not bool(on.any()):
            continue
        ids = torch.from_numpy(s.tokens.astype(np.int64))
        logits = model.chunks[0](ids[None, :-1], torch.arange(len(ids) - 1)[None], None)[0].double()
        outside = torch.zeros(logits.shape, dtype=torch.bool)
        for i in range(len(ids) - 1):
            kept = [] if s.mask is None else s.mask.ids[s.mask.indptr[i + 1] : s.mask.indptr[i + 2]].tolist()
            if kept:
                outside[i] = True
                outside[i, kept] = False
        inside = (logits / OBJECTIVE.temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
        new = inside.gather(1, ids[1:, None])[:, 0][on]
        sampler = torch.from_numpy(s.sampler_logprobs[1:])[on].double()  # type: ignore[index]
        ratio = torch.exp(new - new.detach())
        total = total - (torch.exp(new.detach() - sampler).clamp(max=2.0) * ratio * s.advantage).sum() / trained
    total.backward()
    return float(total), gradients(model.ddp)
