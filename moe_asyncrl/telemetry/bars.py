"""A small picture as SVG: panels of labelled horizontal bars. Pure; needs nothing to draw and nothing to show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW, LABEL, VALUE, GAP = 760, 22, 170, 150, 34
"""Pixels: of the picture, of a row, of the labels, of the values, above a panel."""


@dataclass(frozen=True)
class Bar:
    """One row. The bar is as long as `value` among the panel's values; below 0 there is none."""

    label: str
    value: float
    text: str
    """Written behind it."""
    strong: bool = False


@dataclass(frozen=True)
class Panel:
    """Bars on one scale."""

    title: str
    bars: tuple[Bar, ...]


def picture(title: str, panels: Sequence[Panel]) -> str:
    """The SVG document."""
    rows, y = [], 34
    for panel in panels:
        y += GAP
        rows.append(_text(12, y - 12, panel.title, "h"))
        top = max((b.value for b in panel.bars), default=0.0)
        for b in panel.bars:
            length = 0.0 if top <= 0 else max(0.0, b.value / top) * (WIDTH - LABEL - VALUE)
            rows.append(_text(LABEL - 8, y + 15, b.label, "l"))
            rows.append(
                f'<rect x="{LABEL}" y="{y + 4}" width="{length:.1f}" height="{ROW - 8}" rx="2" '
                f'class="{"strong" if b.strong else "bar"}"/>'
            )
            rows.append(_text(LABEL + length + 8, y + 15, b.text, "v"))
            y += ROW
    height = y + 16
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">
<style>
text {{ font: 13px system-ui, sans-serif; fill: #1f2933; }}
.t {{ font-weight: 600; font-size: 16px; }}
.h {{ font-weight: 600; }} .l {{ text-anchor: end; }} .v {{ fill: #52606d; }}
.bar {{ fill: #9fb3c8; }} .strong {{ fill: #c2410c; }}
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
{_text(12, 26, title, "t")}
{chr(10).join(rows)}
</svg>
"""


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
