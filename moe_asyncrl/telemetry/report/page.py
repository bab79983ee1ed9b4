"""The page: HTML around the charts, with everything that it needs inside."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

from moe_asyncrl.telemetry.figures import duration
from moe_asyncrl.telemetry.report.chart import Chart, Section
from moe_asyncrl.telemetry.report.headline import STATUS, headline, what_was_run
from moe_asyncrl.telemetry.report.learning import learning, off_policy
from moe_asyncrl.telemetry.report.read import RunData
from moe_asyncrl.telemetry.report.routing import routing
from moe_asyncrl.telemetry.report.timeline import speed

PROBLEMS = 60
"""Warnings and errors that are shown, the newest ones."""


def sections_of(run: RunData) -> tuple[Section, ...]:
    """All charts of a run."""
    return learning(run), off_policy(run), routing(run), speed(run)


def page(run: RunData) -> str:
    """The whole report as HTML."""
    sections = sections_of(run)
    specs = {c.id: {"data": c.traces, "layout": c.layout} for s in sections for c in s.charts if c.traces}
    written = datetime.datetime.fromtimestamp(run.now).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    title = f"Report: {run.name}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(run.name)} <span class="status {_tone(run.status)}">{escape(run.status)}</span></h1>
<p>{escape(STATUS.get(run.status, ""))} <span class="muted">Report of {escape(written)}.</span></p>
{f'<p class="error">{escape(run.error)}</p>' if run.error else ""}
</header>
<main>
<section id="figures">{_figures(run)}</section>
{"".join(_section(s) for s in sections)}
{_problems(run)}
{_settings(run.recipe)}
</main>
<noscript><p>The charts need JavaScript, which this browser does not run.</p></noscript>
<script type="application/json" id="specs">{_json(specs)}</script>
<script>{_plotly()}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _json(value: Any) -> str:
    # Inside a script element, only `</` and `<!--` could end it or change how it is read.
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("moe_asyncrl.telemetry.report").joinpath("assets", name).read_text(encoding="utf-8")


def _plotly() -> str:
    return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def _tone(status: str) -> str:
    return {"ok": "good", "failed": "bad", "silent": "bad", "stopped": "warn"}.get(status, "calm")


def _figures(run: RunData) -> str:
    cells = "".join(
        f"<div><dt>{escape(f.name)}</dt><dd><strong>{escape(f.value)}</strong><span>{escape(f.text)}</span></dd></div>"
        for f in headline(run)
    )
    return f"<dl>{cells}</dl>"


def _section(section: Section) -> str:
    intro = f"<p>{escape(section.text)}</p>" if section.text else ""
    charts = "".join(_chart(c) for c in section.charts)
    return f'<section><h2>{escape(section.title)}</h2>{intro}<div class="charts">{charts}</div></section>'


def _chart(chart: Chart) -> str:
    head = f"<h3>{escape(chart.title)}</h3><p>{escape(chart.text)}</p>"
    body = (
        f'<div class="chart" id="{chart.id}" style="height:{chart.height}px" role="img" '
        f'aria-label="{escape(chart.title)}"></div>'
        if chart.traces
        else f'<p class="missing" id="{chart.id}">{escape(chart.missing)}</p>'
    )
    return f'<figure class="{"wide" if chart.wide else "half"}">{head}{body}</figure>'


def _problems(run: RunData) -> str:
    rows: list[tuple[str, str, str, str, str]] = [
        (p.last, p.role, p.level.lower(), f"{p.count:,}", p.text) for p in run.problems
    ]
    began = run.began or 0.0
    for f in run.events.failed:
        when = datetime.datetime.fromtimestamp(f.end).strftime("%Y-%m-%d %H:%M:%S")
        rows.append(
            (when, f.role, "error", "1", f"{f.span} failed {duration(f.end - began)} after the start: {f.error}")
        )
    rows = sorted(rows)[-PROBLEMS:]
    if not rows:
        return "<section><h2>Warnings and errors</h2><p>The roles' logs hold none.</p></section>"
    head = "".join(f"<th>{name}</th>" for name in ("last time", "role", "level", "times", "message"))
    body = _rows(rows)
    more = run.events.failed_count - len(run.events.failed)
    note = f"<p>{more:,} earlier failed spans are not shown.</p>" if more else ""
    return f"""<section><h2>Warnings and errors</h2>
<p>From the ends of the roles' logs and from spans that failed, oldest first. Lines that say the same are counted.</p>
{note}<div class="scroll"><table id="problems"><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div></section>"""


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)


def _settings(recipe: dict[str, Any]) -> str:
    rows = what_was_run(recipe)
    if not rows:
        return ""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in rows)
    return f"""<section><h2>What was run</h2><p>The whole recipe stands in recipe.yaml of the run folder.</p>
<table id="settings"><tbody>{body}</tbody></table></section>"""
