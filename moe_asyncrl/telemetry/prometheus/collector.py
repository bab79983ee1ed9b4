"""One role's figures as Prometheus collects them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moe_asyncrl.telemetry.jsonl import JsonlTail
from moe_asyncrl.telemetry.live_state import LiveState, read_state
from moe_asyncrl.telemetry.prometheus import families as names
from moe_asyncrl.telemetry.prometheus.spans import CHUNK, SpanFigures
from moe_asyncrl.telemetry.run_folder import RunFolder

Table = tuple[tuple[str, str, str], ...]


class RoleCollector(Collector):
    """Figures of one role, from what it wrote into the run folder since this was made, and from `state.json`.

    Only new lines are read. `refresh` is for whoever lets time pass, so that a collection has little left to read.
    """

    def __init__(
        self, folder: RunFolder, role: str, *, from_start: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """`role`: its name, for example `trainer-0`. `from_start` also counts what the files hold already."""
        self._folder, self._role, self._clock = folder, role, clock
        self._kind = role.partition("-")[0]
        self._spans = SpanFigures(folder.events_path, role, from_start=from_start)
        path = folder.metrics_path
        self._tail = JsonlTail(path) if from_start else JsonlTail.from_end(path)
        self._newest: dict[str, dict[str, Any]] = {}
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read what is new. Raises OSError."""
        with self._lock:
            self._refresh()

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is to tell depends on the run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All figures that are known."""
        with self._lock:
            self._refresh()
            found = list(self._families())
        yield from found

    def _refresh(self) -> None:
        self._spans.refresh()
        # Metrics are written by the trainer's first rank and by the rollout.
        if self._role != "trainer-0" and self._kind != "rollout":
            return
        while True:
            before = self._tail.offset
            for m in self._tail.read(CHUNK):
                kind = m.get("kind")
                if isinstance(kind, str):
                    self._newest[kind] = m
                if kind == "step":
                    for name, field, _ in names.STEP_SUMS:
                        value = 1 if not field else m.get(field)
                        if isinstance(value, int | float):
                            self._sums[name] = self._sums.get(name, 0.0) + value
            if self._tail.offset == before:
                return

    def _families(self) -> Iterator[Metric]:
        yield from self._of_spans()
        new = self._newest
        if self._role == "trainer-0":
            yield from gauges(names.TRAINER, names.STEP, new.get("step", {}))
            yield from gauges(names.TRAINER, names.PROBE, new.get("probe", {}))
            yield from gauges(names.TRAINER, names.WARMUP, new.get("warmup", {}))
            for name, _, text in names.STEP_SUMS:
                yield CounterMetricFamily(names.TRAINER + name, text, value=self._sums.get(name, 0.0))
        elif self._kind == "rollout":
            yield from gauges(names.ROLLOUT, names.RATES, new.get("rollout", {}))
            yield from counters(names.ROLLOUT, names.RATE_SUMS, new.get("rollout", {}))
            yield from gauges(names.ROLLOUT, names.EVAL, new.get("eval", {}))
            yield CounterMetricFamily(names.ROLLOUT + "tokens", "Sampled tokens.", value=self._spans.tokens)
        elif self._kind == "buffer":
            yield from of_buffer(read_state(self._folder))
        elif self._kind == "engine":
            yield from of_engine(read_state(self._folder), self._role, self._clock())
            yield CounterMetricFamily(names.ENGINE + "tokens", "Tokens sampled here.", value=self._spans.tokens)
            yield CounterMetricFamily(
                names.ENGINE + "requests", "Completed requests, an answer each.", value=self._spans.requests
            )

    def _of_spans(self) -> Iterator[Metric]:
        seconds = CounterMetricFamily(names.ROLE + "span_seconds", "Time inside spans.", labels=["span"])
        count = CounterMetricFamily(names.ROLE + "spans", "Spans that ended.", labels=["span"])
        errors = CounterMetricFamily(names.ROLE + "span_errors", "Spans that failed.", labels=["span"])
        for span in sorted(self._spans.count):
            seconds.add_metric([span], self._spans.seconds[span])
            count.add_metric([span], self._spans.count[span])
            errors.add_metric([span], self._spans.errors[span])
        yield from (seconds, count, errors)


def gauges(prefix: str, table: Table, record: Mapping[str, Any]) -> Iterator[Metric]:
    """A gauge for each field of the table that the record has."""
    for name, field, text in table:
        value = record.get(field)
        if isinstance(value, int | float):
            yield GaugeMetricFamily(prefix + name, text, value=float(value))


def counters(prefix: str, table: Table, record: Mapping[str, Any]) -> Iterator[Metric]:
    """A counter for each field of the table that the record has."""
    for name, field, text in table:
        value = record.get(field)
        if isinstance(value, int | float):
            yield CounterMetricFamily(prefix + name, text, value=float(value))


def one_of(name: str, text: str, label: str, value: str, values: tuple[str, ...]) -> Metric:
    """A state as Prometheus likes it: 1 for the one that is, 0 for the others."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for v in values:
        family.add_metric([v], float(v == value))
    return family


def of_buffer(state: LiveState | None) -> Iterator[Metric]:
    """The buffer's queue and the run's state, which it serves."""
    if state is None:
        return
    for name, value, text in (
        ("groups_held", state.held, "Groups that wait to be trained."),
        ("capacity_groups", state.capacity, "Groups that fit."),
        ("groups_issued", state.issued, "Groups that samplers may be working on."),
        ("version", state.version, "Committed policy version."),
        ("step", state.step, "Optimizer steps done."),
        ("epoch", state.epoch, "The trainer's lease."),
    ):
        yield GaugeMetricFamily(names.BUFFER + name, text, value=float(value))
    yield one_of(names.BUFFER + "phase", "Phase of the run.", "phase", state.phase, names.PHASES)
    fates = CounterMetricFamily(names.BUFFER + "trajectories", "Trajectories by fate.", labels=["fate"])
    for fate in names.FATES:
        fates.add_metric([fate], float(getattr(state.counters, fate)))
    yield fates
    members = GaugeMetricFamily(names.BUFFER + "engines", "Engines by state.", labels=["state"])
    for wanted in names.MEMBER_STATES:
        members.add_metric([wanted], float(sum(e.state == wanted for e in state.engines)))
    yield members


def of_engine(state: LiveState | None, name: str, now: float) -> Iterator[Metric]:
    """One engine as the run knows it; `up` is 0 when the run does not know it."""
    own = next((e for e in state.engines if e.name == name), None) if state is not None else None
    yield GaugeMetricFamily(names.ENGINE + "up", "The run knows this engine.", value=float(own is not None))
    if own is None:
        return
    yield GaugeMetricFamily(names.ENGINE + "version", "Weights that it serves.", value=float(own.version))
    yield CounterMetricFamily(names.ENGINE + "starts", "Servers started.", value=float(own.incarnation + 1))
    yield GaugeMetricFamily(
        names.ENGINE + "silence_seconds", "Since its last sign of life.", value=max(0.0, now - own.heartbeat)
    )
    yield one_of(names.ENGINE + "state", "State of the engine.", "state", own.state, names.MEMBER_STATES)
