"""Serves one role's figures for Prometheus from a thread of the role's process, and says where in the run folder.

The thread reads files only, so it neither waits for the role nor lets the role wait. Whatever fails in it is logged
once and ends it, not the role.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from moe_asyncrl.config.recipe import Recipe
from moe_asyncrl.telemetry.live_state import read_state
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic

log = logging.getLogger(__name__)

REFRESH_S = 5.0
"""Between two looks at what the role wrote, in seconds, when nobody collects."""


@contextlib.contextmanager
def exporting(folder: RunFolder, recipe: Recipe, role: str) -> Iterator[None]:
    """Serve the figures of `role` while the body runs, if the recipe says so."""
    if not recipe.telemetry.prometheus:
        yield
        return
    exporter: Exporter | None = None
    try:
        exporter = Exporter(folder, role, host=recipe.telemetry.prometheus_host)
    except Exception as error:
        log.warning("no figures for Prometheus: %s", error)
    try:
        yield
    finally:
        if exporter is not None:
            exporter.close()


class Exporter:
    """An HTTP server with one role's figures under /metrics."""

    def __init__(self, folder: RunFolder, role: str, *, host: str) -> None:
        """Serve at once, on a port that the system chooses. Raises OSError."""
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        from moe_asyncrl.telemetry.prometheus.collector import RoleCollector

        self._folder, self._role = folder, role
        self._file = folder.prometheus_targets / f"{role}.json"
        self._collector = RoleCollector(folder, role)
        registry = CollectorRegistry()
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        self._server, self._thread = start_http_server(0, addr=host, registry=registry)
        self._address = address(host, self._server.server_port)
        self._told: list[Target] = []
        self._end = threading.Event()
        self._tell()
        self._refreshing = threading.Thread(target=self._refresh, name="prometheus", daemon=True)
        self._refreshing.start()

    def close(self) -> None:
        """Stop serving, and take the address back."""
        self._end.set()
        self._server.shutdown()
        self._server.server_close()
        self._refreshing.join(REFRESH_S)
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _refresh(self) -> None:
        try:
            while not self._end.wait(REFRESH_S if self._role.partition("-")[0] != "engine" else 1.0):
                self._collector.refresh()
                self._tell()
        except Exception as error:
            log.warning("figures for Prometheus are no longer refreshed: %s", error)

    def _tell(self) -> None:
        targets = [Target(targets=[self._address], labels=labels(self._folder.path, self._role))]
        server = self._sglang()
        if server is not None:
            targets.append(Target(targets=[server], labels=labels(self._folder.path, f"{self._role}-sglang")))
        if targets != self._told:
            write_atomic(self._file, msgspec.json.encode(targets), durable=False)
            self._told = targets

    def _sglang(self) -> str | None:
        """Address of this engine's SGLang server, which serves figures of its own."""
        state = read_state(self._folder)
        own = next((e for e in state.engines if e.name == self._role), None) if state is not None else None
        return urlsplit(own.url).netloc if own is not None else None


class Target(msgspec.Struct, frozen=True):
    """An entry of a file that Prometheus' `file_sd_configs` reads."""

    targets: list[str]
    labels: dict[str, str]


def labels(run: Path, role: str) -> dict[str, str]:
    """What Prometheus marks a target's figures with."""
    return {"run": run.name, "role": role}


def address(host: str, port: int) -> str:
    """`host:port`, as a URL has it; a host that stands for all addresses becomes this machine's name."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
