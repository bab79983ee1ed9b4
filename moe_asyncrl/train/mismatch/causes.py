"""The gap between sampler and trainer, taken apart: each cause controlled alone, then all that helped together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moe_asyncrl.train.mismatch.align import Place
from moe_asyncrl.train.mismatch.gap import Control, Finding, Gap, finding_of, gap_of, ranked
from moe_asyncrl.train.mismatch.lab import Conditions, Lab

CAUSES = ("weights", "routing", "rows", "truncation", "temperature", "precision")
"""weights: others than those that sampled; routing: live where it could be replayed; rows: recorded routing that does
not belong where it stands; truncation: over what the two sides normalise; temperature; precision: types of numbers."""
NEIGHBOURS = (2, 1)
"""Versions below and above the evaluated one that are tried for all tokens, as a recorded version could be wrong."""
SMALL = 1e-3
"""A gap that is so small a part of the first one is not taken apart any further."""
SAME_TEMPERATURE = 2e-3
"""A fitted factor within so much of 1 is 1."""


@dataclass(frozen=True)
class Unknown:
    """A cause that could not be controlled, and why."""

    cause: str
    why: str


@dataclass(frozen=True)
class VersionGap:
    """Tokens of one recorded version, under the evaluated weights."""

    version: int
    gap: Gap
    weights: bool
    """Whether there are weights of that version to evaluate under."""


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer."""

    layer: int
    """Number in the model."""
    flips: float | None
    """Decisions in which the trainer, given the recorded rows in the layers before, would have chosen another set."""
    flips_live: float | None
    """Decisions in which it chooses another set than was recorded when all layers route live."""
    agreement: float | None
    """Mean part of the recorded experts that it also chooses, all layers routing live."""


@dataclass(frozen=True)
class Mismatch:
    """What was found."""

    version: int
    """Weights that were evaluated."""
    gap: Gap
    findings: tuple[Finding, ...]
    """The best control of each cause, the largest drop first."""
    tried: tuple[Finding, ...]
    """All controls, in the order in which they were made."""
    handled: tuple[tuple[str, Gap], ...]
    """What the trainer already does, and the gap if it did not."""
    steps: tuple[Finding, ...]
    """Causes controlled one on top of the other: the named one, then what takes most of what is left, as long as that
    is worth naming. Drop and share are of the gap before the step; the last one's gap is the rest."""
    unknown: tuple[Unknown, ...]
    versions: tuple[VersionGap, ...]
    layers: tuple[LayerReport, ...]
    temperature: float | None
    """The one that explains the gap best; None if it was not fitted."""

    @property
    def named(self) -> Finding | None:
        """The cause with the largest drop; None if nothing that was tried explains the gap."""
        return self.findings[0] if self.findings and self.findings[0].named else None

    @property
    def rest(self) -> Gap | None:
        """The gap with all that helped controlled; None where nothing did."""
        return self.steps[-1].gap if self.steps else None


def take_apart(lab: Lab, say: Callable[[str], None] = lambda _: None) -> Mismatch:
    """Make every control that the recorded tokens and the weights at hand allow.

    `say` hears what is being evaluated. Raises `ReplayMismatch` for rows that the model cannot have.
    """
    return _Study(lab, say).done()


class _Study:
    def __init__(self, lab: Lab, say: Callable[[str], None]) -> None:
        self.lab, self.say = lab, say
        self.tried: list[tuple[Finding, Conditions]] = []
        self.handled: list[tuple[str, Gap]] = []
        self.unknown: list[Unknown] = []
        self.layers: tuple[LayerReport, ...] = ()
        say("as the trainer did it")
        plain = lab.temperatures(lab.base)[:, None]
        self.first = lab.run(lab.base, plain, lab.evaluated, watch=lab.has_rows and not lab.trainer_replays)
        self.trainer, self.sampler = self.first.logprobs[:, 0], lab.sampler(lab.base)
        self.plain = plain

    def done(self) -> Mismatch:
        self.weights()
        self.rows()
        self.truncation()
        temperature = self.temperature()
        self.precision()
        findings = ranked([f for f, _ in self.tried])
        steps = self.stepwise(findings)
        lab = self.lab
        versions = []
        for version in sorted(set(lab.tokens.version.tolist())):
            at = lab.tokens.version == version
            found = gap_of(self.sampler[at], self.trainer[at], lab.tokens.owner[at])
            versions.append(VersionGap(version, found, version in lab.sources))
        return Mismatch(
            version=lab.evaluated,
            gap=gap_of(self.sampler, self.trainer, lab.tokens.owner),
            findings=tuple(findings),
            tried=tuple(f for f, _ in self.tried),
            handled=tuple(self.handled),
            steps=steps,
            unknown=tuple(self.unknown),
            versions=tuple(versions),
            layers=self.layers,
            temperature=temperature,
        )

    def try_(self, cause: str, how: str, conditions: Conditions) -> None:
        self.say(f"{cause}: {how}")
        control = self.lab.control(cause, how, conditions)
        self.tried.append((self.found(control), conditions))

    def found(self, control: Control) -> Finding:
        return finding_of(self.sampler, self.trainer, control, self.lab.tokens.owner)

    def without(self, what: str, trainer: np.ndarray) -> None:
        self.handled.append((what, gap_of(self.sampler, trainer, self.lab.tokens.owner)))

    def weights(self) -> None:
        lab = self.lab
        seen = set(lab.tokens.version.tolist())
        stale = seen - {lab.evaluated}
        missing = sorted(stale - set(lab.sources))
        if missing:
            count = int(np.isin(lab.tokens.version, missing).sum())
            self.unknown.append(
                Unknown(
                    "weights",
                    f"no weights of version {_list(missing)}, which sampled {count} of {len(lab.tokens.version)} "
                    "tokens: those stay under the evaluated ones",
                )
            )
        if stale & set(lab.sources):
            how = "each token under the version that sampled it"
            self.try_("weights", how, replace(lab.base, weights="own"))
        for version in neighbours(sorted(lab.sources), lab.evaluated):
            if seen != {version}:  # else it was tried just now
                self.try_("weights", f"all tokens under version {version}", replace(lab.base, weights=version))
        if len(lab.sources) == 1:
            self.unknown.append(Unknown("weights", "there are no weights of another version to compare with"))

    def rows(self) -> None:
        lab = self.lab
        if not lab.has_rows:
            if lab.model.router_shape is not None:
                self.unknown.append(Unknown("routing", "the trajectories carry no routing rows"))
            return
        if lab.trainer_replays:
            self.say("routing live")
            live = lab.run(replace(lab.base, rows="live"), self.plain, lab.evaluated, watch=True)
            self.without("routing replay", live.logprobs[:, 0])
            found, flips = live, self.first.flips
        else:
            self.try_("routing", "the recorded rows replayed", replace(lab.base, rows="recorded"))
            found = self.first
            flips = lab.run(replace(lab.base, rows="recorded"), self.plain, lab.evaluated).flips
        assert found.own is not None
        shifted = lab.find_rows(found.own)
        if shifted:
            self.try_("rows", shifted, replace(lab.base, rows="realigned"))
        elif lab.trainer_replays:
            how = "the trainer's own routing instead of the recorded rows"
            self.tried.append(
                (
                    self.found(Control("rows", how, found.logprobs[:, 0], self.sampler)),
                    replace(lab.base, rows="live"),
                )
            )
        self.layers = self.report_layers(flips, found.own, lab.places)

    def report_layers(
        self, flips: tuple[float | None, ...] | None, own: tuple[np.ndarray, ...], found: list[Place]
    ) -> tuple[LayerReport, ...]:
        lab = self.lab
        numbers = lab.model.spec.moe_layer_indices
        differs = np.zeros(len(numbers))
        rows = 0
        for s, o in zip(lab.tokens.samples, own, strict=True):
            if s.experts is not None:
                known = np.ones(len(o), dtype=bool) if s.known is None else s.known
                differs += (np.sort(s.experts.astype(np.int64), -1) != np.sort(o, -1)).any(-1)[known].sum(0)
                rows += int(known.sum())
        return tuple(
            LayerReport(
                layer=number,
                flips=None if flips is None else flips[i],
                flips_live=float(differs[i] / rows) if rows else None,
                agreement=found[i].agreement if found else None,
            )
            for i, number in enumerate(numbers)
        )

    def truncation(self) -> None:
        lab, t = self.lab, self.lab.tokens
        inside = ~np.isnan(t.support)
        if inside.any() or t.masked.any():
            self.try_("truncation", "both sides over the whole vocabulary", replace(lab.base, support="full"))
        if t.masked.any():
            self.say("the mask left out")
            ignored = lab.run(replace(lab.base, support="full"), self.plain, lab.evaluated).logprobs[:, 0]
            self.without("the sampling mask", ignored)
        if t.truncation.asked.any():
            how = "the trainer inside what top-k, top-p and min-p keep of its own probabilities"
            self.try_("truncation", how, replace(lab.base, support="rebuilt"))
            if not t.masked.any():
                self.unknown.append(
                    Unknown("truncation", "sampling was truncated, but no mask is recorded; it was made anew")
                )

    def temperature(self) -> float | None:
        lab = self.lab
        recorded = lab.tokens.temperature
        other = ~np.isnan(recorded) & (np.abs(recorded - lab.setting.temperature) > 1e-6)
        if other.any():
            how = f"the recorded temperature {_list(sorted(set(recorded[other].round(6).tolist())))}"
            self.try_("temperature", how, replace(lab.base, temperature="recorded"))
        self.say("temperature: the one that fits best")
        factor = lab.fitted(lab.base)
        if not math.isfinite(factor):
            return None
        fitted = lab.setting.temperature * factor
        if abs(factor - 1) > SAME_TEMPERATURE:
            how = f"the temperature that fits best, {fitted:.4g} instead of {lab.setting.temperature:g}"
            self.try_("temperature", how, replace(lab.base, temperature=factor))
        return fitted

    def precision(self) -> None:
        lab, s = self.lab, self.lab.setting
        engine = str(s.engine_dtype).removeprefix("torch.")
        if s.engine_dtype == s.trainer_dtype:
            self.unknown.append(
                Unknown("precision", f"both sides are {engine}: kernels may still differ, which is in the rest")
            )
            return
        if s.engine_dtype.itemsize < s.trainer_dtype.itemsize:
            how = f"the trainer's weights rounded to {engine}, computed as before"
            self.try_("precision", how, replace(lab.base, precision="rounded"))
        how = f"the trainer computes in {engine}, by its own kernels"
        self.try_("precision", how, replace(lab.base, precision="engine"))

    def stepwise(self, findings: list[Finding]) -> tuple[Finding, ...]:
        """The named cause, then what takes most of the gap that it leaves, and so on: one cause can hide another."""
        if not findings or not findings[0].named:
            return ()
        lab, owner = self.lab, self.lab.tokens.owner
        whole, steps = gap_of(self.sampler, self.trainer, owner).kl, [findings[0]]
        conditions = self.of(findings[0])
        now = replace(lab.control(findings[0].cause, findings[0].how, conditions), applies=None)
        while steps[-1].gap.kl > SMALL * whole:
            done = {f.cause for f in steps}
            best: tuple[Finding, Conditions, Control] | None = None
            for f in findings:
                if f.cause in done:
                    continue
                self.say(f"with {', '.join(x.cause for x in steps)} controlled: {f.cause}")
                wanted = self.of(f)
                joined = _joined(conditions, wanted, lab.base)
                how = f.how
                if isinstance(wanted.temperature, float):
                    factor = lab.fitted(joined)
                    joined = replace(joined, temperature=factor)
                    how = f"the temperature that fits best, {lab.setting.temperature * factor:.4g}"
                control = replace(lab.control(f.cause, how, joined), applies=None)
                found = finding_of(now.sampler, now.trainer, control, owner)
                if found.named and (best is None or found.drop > best[0].drop):
                    best = found, joined, control
            if best is None:
                break
            steps.append(best[0])
            conditions, now = best[1], best[2]
        return tuple(steps)

    def of(self, finding: Finding) -> Conditions:
        """The conditions of a control that was tried."""
        return next(c for f, c in self.tried if f is finding)


def neighbours(versions: list[int], evaluated: int) -> list[int]:
    """The nearest versions on both sides that there are weights of, the nearest below first."""
    below = [v for v in versions if v < evaluated][::-1][: NEIGHBOURS[0]]
    return below + [v for v in versions if v > evaluated][: NEIGHBOURS[1]]


def _joined(all_: Conditions, one: Conditions, base: Conditions) -> Conditions:
    """`all_` with what `one` changes of `base`."""
    changed = {n: getattr(one, n) for n in one.__dataclass_fields__ if getattr(one, n) != getattr(base, n)}
    return replace(all_, **changed)


def _list(values: list[int] | list[float]) -> str:
    shown = ", ".join(f"{v:g}" for v in values[:6])
    return shown + (f" and {len(values) - 6} more" if len(values) > 6 else "")
