"""Commands that look at a run afterwards: they read its folder and nothing else."""

from __future__ import annotations

from pathlib import Path

from moe_asyncrl.data.errors import UserError, first_line
from moe_asyncrl.telemetry.run_folder import RunFolder


def run_folder(path: str) -> RunFolder:
    """An existing run folder, also one whose recipe this build cannot read. Raises `UserError` if it is none."""
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise UserError(f"{path}: not a run folder (no recipe.yaml in it)")
    return folder


def report(run: str, out: str | None) -> Path:
    """Write the report and return where. Raises `UserError` for what is no run folder, or cannot be written."""
    from moe_asyncrl.telemetry.report.write import write_report

    folder = run_folder(run)
    path = Path(out) if out is not None else folder.path / "report.html"
    try:
        write_report(folder, path)
    except OSError as error:
        raise UserError(f"{path}: the report cannot be written: {first_line(error)}") from None
    return path
