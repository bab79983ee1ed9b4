"""What a role serves for Prometheus, read by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moe_asyncrl.telemetry.prometheus.collector import RoleCollector

Figures = dict[str, float]


def figures(text: str) -> Figures:
    """Every sample, as `name` or `name{label=value,…}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()))
            found[s.name + (f"{{{labels}}}" if labels else "")] = s.value
    return found


def served(collector: RoleCollector) -> Figures:
    """What a collector would serve now."""
    registry = CollectorRegistry()
    registry.register(collector)
    return figures(generate_latest(registry).decode())
