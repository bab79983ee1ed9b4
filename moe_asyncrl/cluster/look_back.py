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


def trace(run: str, out: str | None, first: str | None, last: str | None) -> str:
    """Write a trace and return a line that says what it holds. Raises `UserError`.

    `first` and `last` bound it: `120` is a step, `30s` a time since the run's first event.
    """
    from moe_asyncrl.telemetry.trace import Window, write_trace

    folder = run_folder(run)
    path = Path(out) if out is not None else folder.path / "trace.json.gz"
    window = Window(_moment(folder, "--from", first, end=False), _moment(folder, "--to", last, end=True))
    try:
        written = write_trace(folder, path, window)
    except OSError as error:
        raise UserError(f"{path}: the trace cannot be written: {first_line(error)}") from None
    note = "; only the end of this long run: choose another part with --from and --to" if written.cut else ""
    return f"{path}: {written.spans:,} spans, for ui.perfetto.dev or chrome://tracing{note}"


def _moment(folder: RunFolder, option: str, text: str | None, *, end: bool) -> float | None:
    """Unix time of a step's begin (or end), or of `30s` after the start."""
    from moe_asyncrl.telemetry.trace import first_start, step_times

    if text is None:
        return None
    if text.endswith("s"):
        try:
            seconds = float(text[:-1])
        except ValueError:
            raise UserError(f"{option} {text}: a step such as 120, or seconds such as 30s") from None
        began = first_start(folder.events_path)
        if began is None:
            raise UserError(f"{folder.events_path}: no event that seconds could be counted from")
        return began + seconds
    if not text.isdigit():
        raise UserError(f"{option} {text}: a step such as 120, or seconds such as 30s")
    times = step_times(folder.metrics_path)
    if int(text) not in times:
        done = f"there are steps {min(times)} to {max(times)}" if times else "no step is done"
        raise UserError(f"{option} {text}: no such step, {done}")
    return times[int(text)][1 if end else 0]
