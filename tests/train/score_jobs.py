"""Scoring and probing, run in each worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.batch import Sample
from tests.train.parity_jobs import tiny_spec
from tests.train.step_jobs import model_of, samples


def scores(layout: Layout, *, mode: str, shift: int = 0, spy: bool = False) -> tuple[list[np.ndarray], Any]:
    """Scores of the test's samples, and what each router chose (by MoE layer) if `spy`.

    `shift` moves the routing rows by that many layers: an error that shapes do not show.
    """
    from moe_asyncrl.train.score import score

    model = model_of(tiny_spec(), layout)
    chosen = _watch(model) if spy else {}
    found, _ = score(model, _samples(shift), temperature=0.8, mode=mode, micro_batch_tokens=64)  # type: ignore[arg-type]
    return found, chosen


def probed(
    layout: Layout, *, shift: int = 0, dense: bool = False, missing: bool = False
) -> tuple[Any, dict[int, list[torch.Tensor]]]:
    """What a probe of the test's samples finds, and what each router chose, pass after pass.

    `missing`: the first row of every sample is.
    """
    from moe_asyncrl.train.probe import measure

    no_experts = {"num_experts": 0, "experts_per_token": 0, "moe_intermediate_size": 0, "moe_layers": (False,) * 4}
    model = model_of(tiny_spec(**({"family": "qwen3", **no_experts} if dense else {})), layout)
    chosen = {} if dense else _watch(model)
    given = _samples(shift)
    if missing:
        given = [dataclasses.replace(s, known=np.arange(len(s.tokens) - 1) > 0) for s in given]
    found = measure(model, given, temperature=0.8, allow_missing=missing, micro_batch_tokens=64)
    return found, chosen


def _samples(shift: int) -> list[Sample]:
    given = samples(tiny_spec())
    return [dataclasses.replace(s, experts=np.roll(s.experts, shift, axis=1)) for s in given]  # type: ignore[arg-type]


def _watch(model: Any) -> dict[int, list[torch.Tensor]]:
    """By MoE layer, the expert maps bool [tokens, experts] of each call of its router from now on."""
    from moe_asyncrl.train.replay_hooks import routers_of

    chosen: dict[int, list[torch.Tensor]] = {}
    for layer, router in routers_of(model.chunks, model.spec, model.layout, model.pp_rank):
        router.register_forward_hook(
            lambda _m, _i, out, layer=layer: chosen.setdefault(layer, []).append(out[1].clone())
        )
    return chosen
