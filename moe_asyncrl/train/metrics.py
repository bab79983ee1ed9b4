"""What a step measures, and how it becomes one number for the whole trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

SUMS = (
    "loss",
    "tokens",
    "sequences",
    "positions",
    "real_positions",
    "ratio",
    "clipped",
    "importance",
    "capped",
    "logprob_gap",
    "k3",
    "kl_reference",
    "reference_tokens",
    "entropy",
    "entropy_tokens",
    "decisions",
    "flipped",
    "missing",
    "rows",
    "known_rows",
    "same_version_rows",
)
MAXIMA = ("ratio", "importance", "logprob_gap")


@dataclass
class Totals:
    """Sums and maxima of one rank, by the names above; after `reduced` of all ranks. float64."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, 0.0))

    def add(self, sums: dict[str, float], maxima: dict[str, float] | None = None) -> None:
        """Count more."""
        for name, value in sums.items():
            self.sums[name] += value
        for name, value in (maxima or {}).items():
            self.maxima[name] = max(self.maxima[name], value)

    def reduced(self, device: torch.device) -> Totals:
        """Totals over all ranks of the trainer. One small collective; every rank gets the same."""
        mine = torch.tensor([*self.sums.values(), *self.maxima.values()], dtype=torch.float64, device=device)
        flat = torch.empty(dist.get_world_size() * mine.numel(), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(flat, mine)
        everyone = flat.view(-1, mine.numel())
        n = len(SUMS)
        sums, maxima = everyone[:, :n].sum(0).tolist(), everyone[:, n:].amax(0).tolist()
        return Totals(dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))


@dataclass
class MicroBatchTerms:
    """Sums and maxima of one micro-batch as tensors, so that the device is not waited for until the step's end."""

    names: tuple[str, ...]
    sums: Tensor
    """float32 [names]"""
    maxima_names: tuple[str, ...] = ()
    maxima: Tensor | None = None

    def into(self, totals: Totals) -> None:
        """Add to a rank's totals."""
        maxima = {} if self.maxima is None else dict(zip(self.maxima_names, self.maxima.tolist(), strict=True))
        totals.add(dict(zip(self.names, self.sums.tolist(), strict=True)), maxima)


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step (or the updates of one batch taken together), over all ranks. None: not measured."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences fed to the model."""
    positions: int
    """Positions computed, padding included."""
    padding: float
    """Part of them that was padding."""
    micro_batches: int
    """Of each data-parallel rank."""
    seconds: float
    ratio_mean: float | None = None
    """pi_new / pi_old over trained tokens"""
    ratio_max: float | None = None
    clip_fraction: float | None = None
    """Trained tokens whose ratio was clipped."""
    importance_mean: float | None = None
    """Truncated weight pi_old / pi_sampler over trained tokens"""
    importance_max: float | None = None
    importance_capped: float | None = None
    """Trained tokens whose weight was cut at the cap."""
    logprob_gap: float | None = None
    """Mean of |trainer - sampler| log-probability over trained tokens."""
    logprob_gap_max: float | None = None
    sampler_kl: float | None = None
    """Mean k3 between sampler and trainer over trained tokens, stale ones included."""
    kl_reference: float | None = None
    """Mean k3 between the policy and the reference model over trained tokens, whatever `kl_estimator` is."""
    entropy: float | None = None
    """Mean over trained tokens, in nats."""
    flip_fraction: float | None = None
    """Router decisions in which today's router would have chosen another set of experts."""
    rows: int = 0
    """Routing rows: one for each position of the trajectories."""
    coverage: float | None = None
    """Part of them that the sampler reported."""
    coverage_same_version: float | None = None
    """Part of them that was routed by the weights that sampled their token."""


def step_metrics(
    totals: Totals, *, grad_norm: float, lr: float, micro_batches: int, seconds: float, policy: bool
) -> StepMetrics:
    """Metrics from totals over all ranks. `policy`: ratios and the like were measured."""
    s, m = totals.sums, totals.maxima
    tokens = max(1.0, s["tokens"])

    def mean(name: str) -> float | None:
        return s[name] / tokens if policy else None

    return StepMetrics(
        loss=s["loss"],
        grad_norm=grad_norm,
        lr=lr,
        tokens=int(s["tokens"]),
        sequences=int(s["sequences"]),
        positions=int(s["positions"]),
        padding=1.0 - s["real_positions"] / max(1.0, s["positions"]),
        micro_batches=micro_batches,
        seconds=seconds,
        ratio_mean=mean("ratio"),
        ratio_max=m["ratio"] if policy else None,
        clip_fraction=mean("clipped"),
        importance_mean=mean("importance"),
        importance_max=m["importance"] if policy else None,
        importance_capped=mean("capped"),
        logprob_gap=mean("logprob_gap"),
        logprob_gap_max=m["logprob_gap"] if policy else None,
        sampler_kl=mean("k3"),
        kl_reference=s["kl_reference"] / s["reference_tokens"] if s["reference_tokens"] else None,
        entropy=s["entropy"] / s["entropy_tokens"] if s["entropy_tokens"] else None,
        flip_fraction=s["flipped"] / s["decisions"] if s["decisions"] else None,
        rows=int(s["rows"]),
        coverage=s["known_rows"] / s["rows"] if s["rows"] else None,
        coverage_same_version=s["same_version_rows"] / s["rows"] if s["rows"] else None,
    )


def combined(parts: Sequence[StepMetrics]) -> StepMetrics:
    """One batch's updates as one: counts and seconds add up, maxima of maxima, means weighted by trained tokens."""
    if len(parts) == 1:
        return parts[0]
    tokens = sum(p.tokens for p in parts)

    def mean(name: str) -> float | None:
        known = [(getattr(p, name), p.tokens) for p in parts if getattr(p, name) is not None]
        weight = sum(n for _, n in known)
        return sum(v * n for v, n in known) / weight if weight else None

    def top(name: str) -> float | None:
        return max((getattr(p, name) for p in parts if getattr(p, name) is not None), default=None)

    rows = sum(p.rows for p in parts)
    positions = sum(p.positions for p in parts)
    return StepMetrics(
        loss=mean("loss") or 0.0,
        grad_norm=mean("grad_norm") or 0.0,
        lr=parts[-1].lr,
        tokens=tokens,
        sequences=sum(p.sequences for p in parts),
        positions=positions,
        padding=sum(p.padding * p.positions for p in parts) / max(1, positions),
        micro_batches=sum(p.micro_batches for p in parts),
        seconds=sum(p.seconds for p in parts),
        rows=rows,
        coverage=sum((p.coverage or 0.0) * p.rows for p in parts) / rows if rows else None,
        coverage_same_version=sum((p.coverage_same_version or 0.0) * p.rows for p in parts) / rows if rows else None,
        **{name: mean(name) for name in _MEANS},
        **{name: top(name) for name in ("ratio_max", "importance_max", "logprob_gap_max")},
    )


_MEANS = (
    "ratio_mean",
    "clip_fraction",
    "importance_mean",
    "importance_capped",
    "logprob_gap",
    "sampler_kl",
    "kl_reference",
    "entropy",
    "flip_fraction",
)
