"""One evaluation of the looked-at tokens under given conditions: weights, rows, support, temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_asyncrl.replay.controller import Mode
from moe_asyncrl.train.batch import MicroBatch, make_micro_batch
from moe_asyncrl.train.mismatch.tokens import Floats, Tokens
from moe_asyncrl.train.mismatch.values import Asked, label_logprobs
from moe_asyncrl.train.pack import pack
from moe_asyncrl.train.passes import ModelOnRank, run_passes
from moe_asyncrl.train.replay_hooks import routers_of

Ints = npt.NDArray[np.int64]
Support = Literal["recorded", "full", "rebuilt"]
"""Inside the recorded mask where there is one; over the whole vocabulary; inside what the parameters keep now."""


@dataclass(frozen=True)
class Passed:
    """What one pass gave."""

    logprobs: Floats
    """[N, J], a column for each temperature that was asked for."""
    own: tuple[Ints, ...] | None
    """Experts that the routers used, [R, L, K] a sample with K rising; None unless asked for."""
    flips: tuple[float | None, ...] | None
    """By MoE layer, the part of decisions in which the routers would have chosen another set than the row; None unless
    rows were replayed."""


def evaluate(
    model: ModelOnRank,
    tokens: Tokens,
    temperatures: Floats,
    *,
    support: Support = "recorded",
    rows: Sequence[npt.NDArray[Any] | None] | Literal["recorded", "live"] = "recorded",
    watch: bool = False,
    micro_batch_tokens: int = 8192,
) -> Passed:
    """Score the tokens in one forward pass, on a model that stands on one process.

    Args:
        model: with the weights to look at.
        tokens: N of them.
        temperatures: [N, J].
        support: over what the probabilities are normalised.
        rows: routing: as recorded (missing rows live), live, or given for each sample.
        watch: note the experts that the routers use.
        micro_batch_tokens: most of a micro-batch.

    Raises:
        ReplayMismatch: rows do not fit the model.
    """
    given = rows if not isinstance(rows, str) else [s.experts if rows == "recorded" else None for s in tokens.samples]
    replay = model.router_shape is not None and any(r is not None for r in given)
    samples = [
        replace(s, experts=r, known=s.known if isinstance(rows, str) else None)
        for s, r in zip(tokens.samples, given, strict=True)
    ]
    packing = pack([len(s.tokens) - 1 for s in samples], dp=1, micro_batch_tokens=micro_batch_tokens)
    groups = packing.ranks[0]
    router = model.router_shape if replay else None
    batches = [
        make_micro_batch([samples[i] for i in numbers], router=router, device=model.device) for numbers in groups
    ]
    starts = np.searchsorted(tokens.owner, np.arange(len(samples) + 1))
    where = {
        id(b): np.concatenate([np.arange(starts[i], starts[i + 1]) for i in g])
        for b, g in zip(batches, groups, strict=True)
    }

    def loss_of(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Any]]:
        at = where[id(batch)]
        chosen = batch.trained.nonzero().flatten()
        found = label_logprobs(logits[0, chosen], _asked(tokens, at, batch.labels[0, chosen], temperatures, support))
        return torch.zeros((), device=logits.device), {"at": at, "logprobs": found.cpu().numpy()}

    seen = _Watch(model) if watch else None
    mode: Mode = "replay" if replay else "off"
    try:
        with torch.no_grad():
            reports, stats = run_passes(model, batches, loss_of, forward_only=True, mode=mode, allow_missing=True)
    finally:
        if seen is not None:
            seen.remove()
    out = np.full(temperatures.shape, np.nan)
    for report in reports:
        out[report["at"]] = report["logprobs"]
    flips = None
    if stats is not None:
        of = {each.layer: each for each in stats.layers}
        known = [of[i].decisions - of[i].missing for i in range(model.spec.num_moe_layers)]
        flips = tuple(of[i].flipped / n if n else None for i, n in enumerate(known))
    return Passed(out, None if seen is None else seen.experts(batches, groups, len(samples)), flips)


def _asked(tokens: Tokens, at: Ints, labels: Tensor, temperatures: Floats, support: Support) -> Asked:
    there = labels.device
    rebuild = None
    if support == "rebuilt":
        t = tokens.truncation
        rebuild = torch.from_numpy(np.stack([t.top_k, t.top_p, t.min_p], 1)[at]).float().to(there)
    kept = [tokens.kept[i] if support == "recorded" else None for i in at]
    return Asked(labels, torch.from_numpy(temperatures[at]).float().to(there), kept, rebuild)


class _Watch:
    """Hooks that note the experts of every router, call after call."""

    def __init__(self, model: ModelOnRank) -> None:
        self._maps: dict[int, list[Tensor]] = {}
        self._top_k = model.spec.experts_per_token
        self._hooks = [
            router.register_forward_hook(self._note(layer))
            for layer, router in routers_of(model.chunks, model.spec, model.layout, model.pp_rank)
        ]

    def _note(self, layer: int) -> Any:
        calls = self._maps.setdefault(layer, [])
        return lambda _module, _inputs, output: calls.append(output[1].detach().bool().cpu())

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def experts(self, batches: Sequence[MicroBatch], groups: Sequence[Sequence[int]], count: int) -> tuple[Ints, ...]:
        """By sample; micro-batches ran in order, one call of each router for each."""
        found: list[Ints] = [np.zeros((0, 0, 0), dtype=np.int64)] * count
        layers = sorted(self._maps)
        for b, (batch, numbers) in enumerate(zip(batches, groups, strict=True)):
            # A map has K true cells in each row, so the columns of its true cells are [n, K], rising.
            each = [self._maps[x][b].nonzero()[:, 1].view(-1, self._top_k).numpy() for x in layers]
            rows = np.stack(each, 1)
            for owner, i in zip(batch.owners, numbers, strict=False):
                found[i] = rows[owner.start : owner.end]
        return tuple(found)
