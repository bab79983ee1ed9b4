"""Scoring, run in each worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moe_asyncrl.models.layout import Layout
from tests.train.parity_jobs import tiny_spec
from tests.train.step_jobs import model_of, samples


def scores(layout: Layout, *, mode: str, shift: int = 0, spy: bool = False) -> tuple[list[np.ndarray], Any]:
    """Scores of the test's samples, and what each router chose (by MoE layer) if `spy`.

    `shift` moves the routing rows by that many layers: an error that shapes do not show.
    """
    import dataclasses

    from moe_asyncrl.train.score import score

    spec = tiny_spec()
    model = model_of(spec, layout)
    given = samples(spec)
    if shift:
        given = [dataclasses.replace(s, experts=np.roll(s.experts, shift, axis=1)) for s in given]  # type: ignore[arg-type]
    chosen: dict[int, list[torch.Tensor]] = {}
    if spy:
        from moe_asyncrl.train.replay_hooks import routers_of

        for layer, router in routers_of(model.chunks, spec, layout, model.pp_rank):
            router.register_forward_hook(
                lambda _m, _i, out, layer=layer: chosen.setdefault(layer, []).append(out[1].clone())
            )
    found = score(model, given, temperature=0.8, mode=mode, micro_batch_tokens=64)  # type: ignore[arg-type]
    return found, chosen
