"""One cell of the replay matrix in each worker: a pass without gradients and a step, watched from outside."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from moe_asyncrl.models.layout import Layout
from moe_asyncrl.train.batch import Sample, make_micro_batch
from moe_asyncrl.train.plan import packing_for
from tests.replay.jobs import OBJECTIVE, build, routers


class Witness:
    """Hooks on the model and its routers: what is fed, and which experts are used for it.

    A router's rows are the fed tokens in order, of which a tensor-parallel rank has its even part (Megatron-Core's
    sequence parallelism). A chunk runs its micro-batches in turn, and so does its recomputation.
    """

    def __init__(self, model: Any, table: np.ndarray) -> None:
        self._table = torch.from_numpy(table.astype(np.int64))
        self._model = model
        self._fed: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._used: dict[tuple[int, int, bool], list[torch.Tensor]] = defaultdict(list)
        self._hooks = []
        for c, chunk in enumerate(model.chunks):
            self._hooks.append(
                chunk.register_forward_pre_hook(lambda _m, inputs, c=c: self._fed[c].append(inputs[0][0].clone()))
            )
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    self._hooks.append(layer.mlp.router.register_forward_hook(self._note(c, layer.layer_number - 1)))

    def _note(self, chunk: int, layer: int) -> Any:
        def note(_module: Any, _inputs: Any, output: Any) -> None:
            self._used[chunk, layer, torch.is_grad_enabled()].append(output[1].detach().clone())

        return note

    def take(self) -> dict[int, dict[str, int]]:
        """By layer of the whole model: routed tokens with the right experts, with wrong ones, and padding whose experts
        are not distinct. Forgets everything."""
        tp = self._model.layout.tp
        at = self._model.layout.coordinates(self._model.rank).tp
        number = {layer: i for i, layer in enumerate(self._model.spec.moe_layer_indices)}
        found: dict[int, dict[str, int]] = {}
        for (chunk, layer, _), calls in self._used.items():
            counts = found.setdefault(layer, {"right": 0, "wrong": 0, "padding_twice": 0})
            assert len(calls) == len(self._fed[chunk]), "a router is called once for each micro-batch in a pass"
            for used, fed in zip(calls, self._fed[chunk], strict=True):
                part = fed.chunk(tp)[at]
                wanted = torch.zeros_like(used, dtype=torch.bool)
                wanted.scatter_(1, self._table[part, number[layer]], True)
                same = (used.bool() == wanted).all(-1)
                real = part != 0
                counts["right"] += int((same & real).sum())
                counts["wrong"] += int((~same & real).sum())
                counts["padding_twice"] += int((used.bool().sum(-1) != self._table.shape[2])[~real].sum())
        self._fed.clear()
        self._used.clear()
        return found

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def step(
    layout: Layout,
    *,
    hf_dir: str,
    given: list[Sample],
    table: np.ndarray,
    recompute: str,
    padded: bool,
    mode: str = "replay",
    build_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The old policy's pass and one step over `given`, both replayed: loss, gradients, and what the witness saw."""
    from moe_asyncrl.train.score import logprobs_of_batches
    from moe_asyncrl.train.step import gradients
    from tests.train.sharded import gradients as parts

    model = build(layout, hf_dir, recompute=recompute, **(build_options or {}))
    packing = packing_for([len(s.tokens) - 1 for s in given], layout, micro_batch_tokens=1 if padded else 48)
    batches = [
        make_micro_batch(
            [given[i] for i in numbers],
            layout=layout,
            rank=model.rank,
            multiple=16 if padded else 1,
            router=model.router_shape,
        )
        for numbers in packing.ranks[layout.coordinates(model.rank).dp]
    ]
    witness = Witness(model, table)
    old, _ = logprobs_of_batches(model, batches, temperature=1.0, mode=mode)  # type: ignore[arg-type]
    before = witness.take()
    for batch, values in zip(batches, old or (), strict=False):
        batch.old_logprobs = values
    totals = gradients(model, batches, OBJECTIVE, mode=mode)  # type: ignore[arg-type]
    after = witness.take()
    witness.remove()
    assert before.keys() == after.keys() == {layer for layer, _ in routers(model)}
    witnessed = {
        layer: {name: counts[name] + before[layer][name] for name in counts} for layer, counts in after.items()
    }
    held = sum(0 if b.rows is None else b.rows.numel() for b in batches)
    return {"loss": totals.sums["loss"], "gradients": parts(model.ddp), "witnessed": witnessed, "held": held}
