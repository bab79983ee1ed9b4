"""From a run folder to `report.html`."""

from __future__ import annotations

from pathlib import Path

from moe_asyncrl.telemetry.report.page import page
from moe_asyncrl.telemetry.report.read import read_run
from moe_asyncrl.telemetry.run_folder import RunFolder, write_atomic


def write_report(folder: RunFolder, out: Path) -> None:
    """Write the report of a run, in whatever state it is. Raises OSError if `out` cannot be written."""
    write_atomic(out, page(read_run(folder)).encode(), durable=False)
