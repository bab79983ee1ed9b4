"""What `moe-asyncrl mismatch` says: plain values for JSON, and lines for people. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from moe_asyncrl.train.mismatch.causes import Mismatch
from moe_asyncrl.train.mismatch.gap import Gap

LAYERS = 12
"""Layers that the table shows, those with the most flips."""


@dataclass(frozen=True)
class Bounds:
    """What the gap may be at most; None for no bound."""

    max_kl: float | None = None
    """Mean k3, nats a token."""
    max_abs: float | None = None
    """Largest |trainer - sampler| log-probability of a token."""

    def broken(self, gap: Gap) -> list[str]:
        """The bounds that do not hold, in words. A gap that is no number breaks each of them."""
        found = []
        for name, value, bound in (("mean k3", gap.kl, self.max_kl), ("max |Δ|", gap.max_abs, self.max_abs)):
            if bound is not None and not value <= bound:
                found.append(f"{name} {value:.3g} is above {bound:g}")
        return found


def as_values(found: Mismatch, about: dict[str, Any], bounds: Bounds) -> dict[str, Any]:
    """Everything, for JSON. A number that is none becomes None."""
    broken = bounds.broken(found.gap)
    values = {
        **about,
        **asdict(found),
        "handled": [{"what": what, "gap": asdict(gap)} for what, gap in found.handled],
        "rest": None if found.rest is None else asdict(found.rest),
        "first": found.named.cause if found.named is not None else None,
        "findings": [{**asdict(f), "named": f.named} for f in found.findings],
        "bounds": {**asdict(bounds), "hold": not broken, "broken": broken},
    }
    cleaned = _clean(values)
    assert isinstance(cleaned, dict)
    return cleaned


def lines(found: Mismatch, about: dict[str, Any], bounds: Bounds) -> list[str]:
    """The report as text."""
    g = found.gap
    out = [
        f"{about['run']}: version {found.version} ({about['weights']}), {about['trajectories']} trajectories, "
        f"{g.tokens:,} sampled tokens of steps {about['steps'][0]} to {about['steps'][1]}",
        f"gap between sampler and trainer: mean k3 {_with_error(g.kl, g.kl_error)} nats a token, "
        f"mean |Δ| {g.mean_abs:.3g}, max |Δ| {g.max_abs:.3g}",
        "",
    ]
    if found.findings:
        out.append(f"{'cause':<12} {'drop of k3':>20} {'share':>8} {'left':>10} {'max |Δ|':>9}  controlled by")
        for f in found.findings:
            part = "" if f.tokens == g.tokens else f" ({f.tokens} of {g.tokens} tokens)"
            out.append(
                f"{f.cause:<12} {_with_error(f.drop, f.drop_error):>20} {f.share:>8.1%} {f.gap.kl:>10.2e} "
                f"{f.gap.max_abs:>9.2e}  {f.how}{part}"
            )
        out.append("")
    if found.named is None:
        out.append("nothing that was tried explains the gap")
    else:
        out.append(f"first: {found.named.cause}: {found.named.how}")
        out += [
            f"then:  {s.cause}: {s.how}: takes {s.drop:.2e} of what is left ({s.share:.0%})" for s in found.steps[1:]
        ]
        if found.rest is not None:
            out.append(
                f"rest:  with {_and(found)} controlled, mean k3 {found.rest.kl:.2e} ({found.rest.kl / g.kl:.1%})"
            )
    for what, gap in found.handled:
        out.append(f"controlled already: without {what} the mean k3 would be {gap.kl:.2e} ({_times(gap.kl, g.kl)})")
    out += [f"not known: {u.cause}: {u.why}" for u in found.unknown]
    if len(found.versions) > 1 or found.versions[0].version != found.version:
        out += ["", f"{'version':>8} {'tokens':>8} {'mean k3':>10} {'max |Δ|':>10}  weights at hand"]
        for v in found.versions:
            note = "these were evaluated" if v.version == found.version else "yes" if v.weights else "no"
            out.append(f"{v.version:>8} {v.gap.tokens:>8} {v.gap.kl:>10.2e} {v.gap.max_abs:>10.2e}  {note}")
    if found.layers:
        shown = sorted(found.layers, key=lambda x: -(x.flips or 0))[:LAYERS]
        out += ["", f"{'MoE layer':>9} {'flips':>9} {'flips live':>11} {'agreement':>10}"]
        for x in sorted(shown, key=lambda x: x.layer):
            out.append(f"{x.layer:>9} {_part(x.flips):>9} {_part(x.flips_live):>11} {_part(x.agreement):>10}")
        if len(found.layers) > len(shown):
            out.append(f"  and {len(found.layers) - len(shown)} layers with fewer flips")
    if bounds.max_kl is not None or bounds.max_abs is not None:
        broken = bounds.broken(g)
        out += ["", f"bound exceeded: {'; '.join(broken)}" if broken else "the bound holds"]
    return out


def _and(found: Mismatch) -> str:
    return ", ".join(s.cause for s in found.steps)


def _with_error(value: float, error: float) -> str:
    return f"{value:.2e}" if math.isnan(error) else f"{value:.2e} ± {error:.0e}"


def _times(a: float, b: float) -> str:
    return f"{a / b:.3g} times as much" if b > 0 else "from nothing"


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list | tuple) else value
