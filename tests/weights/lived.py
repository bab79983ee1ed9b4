"""What transformers says about a reply, given which weights wrote which keys and values and sampled which token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moe_asyncrl.engine.completion import Completion
from tests.weights.mix import Mix, Mixed, mix_of

EDGE = 1e-5
"""Two experts whose router logits are closer than this may change places between two right implementations."""


@dataclass(frozen=True)
class Pass:
    """Weights that read the positions [begin, end)."""

    mix: Mix
    begin: int
    end: int


@dataclass(frozen=True)
class Seen:
    """What a reading of all positions says."""

    logprobs: npt.NDArray[np.float32]
    """[T-1]: of each token but the first, at the position before it"""
    short: npt.NDArray[np.float32]
    """[T-1]: by how much, in router logits, a given row's experts miss being the best ones, in the worst layer; 0 if
    they are"""
    margin: float
    """The smallest distance between an expert that is chosen and one that is not, over rows that were not given."""


def read(mixed: Mixed, ids: Sequence[int], passes: Sequence[Pass], rows: npt.NDArray[np.integer] | None = None) -> Seen:
    """Read a sequence with weights that change on the way, and keep keys and values.

    `rows` [T-1, L, K]: experts said to have been chosen; -1 where nothing is said. Where they differ from the best ones
    by no more than rounding may, the reading follows them, since the values behind depend on it.
    """
    assert passes[0].begin == 0 and all(a.end == b.begin for a, b in itertools.pairwise(passes))
    short = np.zeros(passes[-1].end, dtype=np.float32)
    margin = float("inf")
    picked = []
    past = None
    for one in passes:

        def watch(layer: int, output: tuple[torch.Tensor, ...], one: Pass = one) -> tuple[torch.Tensor, ...] | None:
            nonlocal margin
            logits, weights, chosen = output
            k = chosen.shape[-1]
            best = logits.topk(k + 1, dim=-1).values
            gap = best[:, k - 1] - best[:, k]
            if rows is None:
                margin = min(margin, float(gap.min()))
                return None
            said = torch.from_numpy(rows[one.begin : one.end, layer].astype(np.int64))
            known = said[:, 0] >= 0
            if not bool(known.all()):
                margin = min(margin, float(gap[~known].min()))
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, said.clamp(min=0), True)
            missed = logits.masked_fill(inside, -torch.inf).amax(1) - logits.masked_fill(~inside, torch.inf).amin(1)
            missed = missed.clamp(min=0) * known
            short[one.begin : one.end] = np.maximum(short[one.begin : one.end], missed.numpy())
            follow = known & (missed > 0) & (missed <= EDGE)
            if not bool(follow.any()):
                return None
            other = logits.softmax(-1).gather(1, said.clamp(min=0))
            other = other / other.sum(-1, keepdim=True)
            return (
                logits,
                torch.where(follow[:, None], other, weights),
                torch.where(follow[:, None], said, chosen),
            )

        with torch.no_grad(), mixed.routed(watch):
            part = torch.tensor([list(ids[one.begin : one.end])])
            out = mixed.at(one.mix)(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        after = torch.tensor(list(ids[one.begin + 1 : one.end + 1]))
        picked.append(torch.log_softmax(out.logits[0], -1).gather(1, after[:, None])[:, 0].numpy())
    return Seen(np.concatenate(picked), short, margin)


@dataclass(frozen=True)
class Span:
    """Output tokens [start, end) of one version."""

    version: int
    start: int
    end: int


def spans_of(versions: npt.NDArray[np.int32]) -> list[Span]:
    """Runs of equal versions."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [Span(int(versions[a]), a, b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Verdict:
    """How far a reply is from transformers."""

    logprobs: npt.NDArray[np.float32]
    """[n]: absolute deviations of the output tokens"""
    short: float
    """See `Seen`, over all rows."""
    margin: float

    @property
    def worst(self) -> float:
        return float(self.logprobs.max())


def judge(
    mixed: Mixed, prompt: Sequence[int], done: Completion, *, keep: bool, spans: Sequence[Span] | None = None
) -> Verdict:
    """Against what the reply says of its versions. `keep`: keys and values stay when weights change, else they are
    computed anew. `spans`: other versions than it says."""
    spans = spans_of(done.versions) if spans is None else spans
    ids = [*map(int, prompt), *map(int, done.output_ids)]
    p, last = len(prompt), len(ids) - 1
    rows = done.experts
    assert rows is not None and len(rows) == last
    parts = [Pass(mix_of(s.version), p + s.start - 1 if s.start else 0, p + s.end - 1) for s in spans]
    if keep:
        seen = read(mixed, ids, parts, rows)
        return Verdict(np.abs(seen.logprobs[p - 1 :] - done.logprobs), float(seen.short.max()), seen.margin)
    found, short, margin = [], 0.0, float("inf")
    for part in parts:
        # Rows of tokens that were sampled before are those of their first reading.
        own = rows.astype(np.int64)
        own[: part.begin] = -1
        seen = read(mixed, ids[: part.end + 1], [Pass(part.mix, 0, part.end)], own)
        found.append(seen.logprobs[max(part.begin, p - 1) :])
        short, margin = max(short, float(seen.short.max())), min(margin, seen.margin)
    return Verdict(np.abs(np.concatenate(found) - done.logprobs), short, margin)


def labels_hold(prompt: Sequence[int], done: Completion) -> bool:
    """Each routing row says the version of the pass that read its token, and that nothing of it is missing."""
    assert done.row_runs is not None
    said = np.full(len(prompt) + len(done.output_ids) - 1, -9, dtype=np.int32)
    for run in done.row_runs:
        if run.source == "missing":
            return False
        said[run.start : run.end] = run.version
    due = np.concatenate([np.full(len(prompt) - 1, done.versions[0]), done.versions])
    return bool(np.array_equal(said, due))
