"""Recorded trajectories as the samples of a pass and flat arrays over the N tokens that are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_asyncrl.data.errors import UserError
from moe_asyncrl.data.trajectory import SamplingMask, SamplingParams, Trajectory
from moe_asyncrl.data.validate import known_rows
from moe_asyncrl.train.batch import Sample

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Truncation:
    """How each of N tokens was truncated when it was sampled; all arrays [N]."""

    top_k: npt.NDArray[np.int64]
    """0 for no limit."""
    top_p: Floats
    min_p: Floats

    @property
    def asked(self) -> Bools:
        """Tokens whose distribution was cut off at all."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


@dataclass(frozen=True)
class Tokens:
    """What is looked at: samples, and of their N chosen tokens, sample by sample, what was recorded."""

    samples: tuple[Sample, ...]
    """`trained` marks the chosen tokens. Without masks: those are in `kept`."""
    full: Floats
    """[N], the sampler's log-probability over the whole vocabulary."""
    support: Floats
    """[N], the sampler's one inside its mask; NaN where none was recorded."""
    kept: tuple[npt.NDArray[np.int32] | None, ...]
    """N arrays of token ids that truncation kept; None where none are recorded."""
    version: npt.NDArray[np.int64]
    """[N], the weights that sampled, by what was recorded."""
    temperature: Floats
    """[N], recorded; NaN where the record does not say."""
    truncation: Truncation
    owner: npt.NDArray[np.int64]
    """[N], number of the sample."""

    @property
    def masked(self) -> Bools:
        """[N], tokens with a recorded mask."""
        return np.asarray([ids is not None for ids in self.kept], dtype=bool)

    @property
    def sampler(self) -> Floats:
        """[N], what a trainer compares with: inside the mask where the sampler reported that, else over all tokens."""
        return np.where(np.isnan(self.support), self.full, self.support)


def tokens_from(trajectories: Sequence[Trajectory], *, version: int | None = None) -> Tokens:
    """All sampled tokens of the trajectories; with `version`, only those that these weights sampled.

    Trajectories without a token that is looked at are left out. Raises `UserError` if nothing is left.
    """
    samples, parts = [], []
    for t in trajectories:
        chosen = t.loss_mask if version is None else t.loss_mask & (t.weight_version == version)
        if not chosen.any() or t.length < 2:
            continue
        samples.append(
            Sample(
                name=t.identity.trajectory,
                tokens=t.tokens,
                trained=chosen,
                sampler_logprobs=t.logprobs,
                experts=t.routing_experts,
                known=None if t.routing_experts is None else known_rows(t.routing_runs, t.length - 1),
            )
        )
        parts.append((t, np.flatnonzero(chosen)))
    if not samples:
        of = "" if version is None else f" of version {version}"
        raise UserError(f"no sampled token{of} in {len(trajectories)} trajectories")
    params = [p for t, at in parts for p in _sampling(t, at)]
    return Tokens(
        samples=tuple(samples),
        full=np.concatenate([t.logprobs[at] for t, at in parts]).astype(np.float64),
        support=np.concatenate([_support(t, at) for t, at in parts]),
        kept=tuple(ids for t, at in parts for ids in _kept(t.sampling_mask, at)),
        version=np.concatenate([t.weight_version[at] for t, at in parts]).astype(np.int64),
        temperature=np.asarray([float("nan") if p is None else p.temperature for p in params]),
        truncation=Truncation(
            top_k=np.asarray([0 if p is None else p.top_k for p in params], dtype=np.int64),
            top_p=np.asarray([1.0 if p is None else p.top_p for p in params]),
            min_p=np.asarray([0.0 if p is None else p.min_p for p in params]),
        ),
        owner=np.repeat(np.arange(len(parts)), [len(at) for _, at in parts]),
    )


def _support(t: Trajectory, at: npt.NDArray[np.int64]) -> Floats:
    if t.support_logprobs is None:
        return np.full(len(at), np.nan)
    return t.support_logprobs[at].astype(np.float64)


def _kept(mask: SamplingMask | None, at: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32] | None]:
    if mask is None:
        return [None] * len(at)
    found = [mask.ids[mask.indptr[i] : mask.indptr[i + 1]] for i in at]
    return [ids if len(ids) else None for ids in found]


def _sampling(t: Trajectory, at: npt.NDArray[np.int64]) -> list[SamplingParams | None]:
    each: list[SamplingParams | None] = [None] * t.length
    for s in t.segments:
        each[s.start : s.end] = [s.sampling] * (s.end - s.start)
    return [each[i] for i in at]
